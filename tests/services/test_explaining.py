"""What is told of a run from its recorded events alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jigsawrl.contract.codec import encode
from jigsawrl.contract.events import VersionPublished
from jigsawrl.core import profiles
from services.scheduler.graph import describe, graph_of, picture, played
from services.scheduler.reasons import doing
from services.scheduler.recorded import last_state
from services.scheduler.segments import Entry, write_segment
from services.scheduler.snapshots import Snapshot, encode_snapshot, write_snapshot
from services.scheduler.why import explain, took_s
from tests.unit.core.world import Faults, World, spec


@pytest.fixture(scope="module")
def world() -> World:
    """Two pipelines, multiplexed to the middle of their steps."""
    pipelines = [spec(name, num_steps=12, evaluation=None) for name in ("a", "b")]
    made = World(seed=1, faults=Faults(), pipelines=pipelines, policy="jigsaw")
    made.run_until(lambda: made.scheduler.state.pipelines["b"].version == 8)
    return made


def test_what_nobody_reads_to_its_end_is_no_failure() -> None:
    code = (
        "from services.scheduler.recorded import print_lines;"
        "print_lines(str(n) * 100 for n in range(100_000))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def record(world: World, folder: Path) -> None:
    write_segment(folder / "events", [Entry(s, t, encode(e)) for e, t, s in world.log])


def test_the_last_state_is_that_of_the_scheduler_with_or_without_a_snapshot(
    world: World, tmp_path: Path
) -> None:
    record(world, tmp_path)
    wanted = world.scheduler.state
    assert last_state(tmp_path) == wanted
    sequence, state = list(world.snapshots.items())[-1]
    snapshot = Snapshot(sequence=sequence, code_version="1", state=state)
    payload = encode_snapshot(snapshot)
    write_snapshot(tmp_path / "snapshots", sequence=sequence, payload=payload)
    assert last_state(tmp_path) == wanted


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither snapshots nor events"):
        last_state(tmp_path)


def test_why_tells_of_every_tenant_and_of_the_last_decisions(world: World) -> None:
    text = "\n".join(explain(world.scheduler.state))
    assert text.startswith("policy jigsaw")
    assert "a.trainer0: " in text
    assert "b.rollout1: " in text
    assert "predictions off by" in text
    assert "expects the next steps to end in" in text
    only = "\n".join(explain(world.scheduler.state, "b"))
    assert "a.trainer0: " not in only
    with pytest.raises(ValueError, match="no pipeline c; there are: a, b"):
        list(explain(world.scheduler.state, "c"))


def test_the_graph_names_nodes_ready_ones_and_the_critical_path(world: World) -> None:
    graph, table = graph_of(world.scheduler.state), profiles.table(world.scheduler.state)
    text = "\n".join(describe(graph, table))
    assert "forward_backward: " in text
    assert "\nready: " in text
    assert "critical path" in text
    assert played(graph, table).makespan_s >= graph.critical_path_s()
    page = picture(graph, table)
    assert page.count("<rect") >= len([node for node in graph.nodes if node.work_s > 0])
    assert "http" not in page, "self-contained"


def test_without_history_there_is_no_graph_yet() -> None:
    world = World(seed=0, faults=Faults(), pipelines=[spec()])
    world.run_until(lambda: world.scheduler.state.pipelines["p"].version == 0)
    with pytest.raises(ValueError, match="nothing is predicted yet"):
        graph_of(world.scheduler.state)


def test_decisions_whose_steps_have_ended_are_compared_with_what_was_predicted(
    world: World,
) -> None:
    state = world.scheduler.state
    published_s = {
        (event.pipeline, event.version): timestamp_s
        for event, timestamp_s, _ in world.log
        if isinstance(event, VersionPublished)
    }
    begun_s = world.log[0][1]
    offset_s = world.now_s - begun_s - state.clock.now_s
    ended = [one for one in state.outlooks.decisions if took_s(state, one) is not None]
    assert 4 < len(ended) < len(state.outlooks.decisions), "the last ones have not"
    for decision in ended:
        ends = [published_s[name, version] for name, version in decision.until.items()]
        took = took_s(state, decision)
        assert took is not None
        since_s = max(ends) - begun_s - offset_s - decision.now_s
        assert took == pytest.approx(since_s, abs=0.3)
    assert {name for one in ended for name in one.until} == {"a", "b"}
    text = "\n".join(explain(state))
    assert f"{len(ended)} decisions whose steps have ended: these took " in text
    assert "sooner than by the list schedule" in text
    assert "they have not ended (a to version " in text


def test_why_gives_a_reason_for_every_worker(world: World) -> None:
    lines = [line for line in explain(world.scheduler.state) if line.startswith("  ")]
    tenants = [t for p in world.scheduler.state.pipelines.values() for t in p.tenants]
    for name in tenants:
        [line] = [line for line in lines if line.startswith(f"  {name}: ")]
        assert not line.endswith(": ")


def test_what_a_worker_waits_for_is_told_at_each_stage() -> None:
    told: dict[str, set[str]] = {}
    made = World(seed=0, faults=Faults(), pipelines=[spec("a", evaluation=None)], policy="jigsaw")
    state = made.scheduler.state

    def watch() -> bool:
        for tenant in state.pipelines["a"].tenants.values():
            kind, why = doing(state, state.pipelines["a"], tenant)
            told.setdefault(tenant.role, set()).add(f"{kind}: {re.sub('[0-9.]+', 'N', why)}")
        return not state.pipelines["a"].live

    made.run_until(watch)
    assert told["trainer"] >= {
        "idle: its process is not up",
        "idle: it sets itself up",
        "idle: the batch for version N lacks N sequences and N scores",
        "forward_backward: step to version N; equal shares: nothing is predicted",
        "idle: its pipeline is finished",
    }
    assert told["rollout"] >= {
        "idle: version N is being trained",
        "tail_decode: N sequences of version N; equal shares: nothing is predicted",
    }
    assert "scores: N were ordered" in told["reward"]
