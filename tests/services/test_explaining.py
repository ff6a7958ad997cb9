"""What is told of a run from its recorded events alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from jigsawrl.contract.codec import encode
from services.scheduler.graph import describe, graph_of, picture, played
from services.scheduler.recorded import last_state
from services.scheduler.segments import Entry, write_segment
from services.scheduler.snapshots import Snapshot, encode_snapshot, write_snapshot
from services.scheduler.why import explain
from tests.unit.core.world import Faults, World, spec


@pytest.fixture(scope="module")
def world() -> World:
    """Two pipelines, multiplexed to the middle of their steps."""
    pipelines = [spec(name, num_steps=12, evaluation=None) for name in ("a", "b")]
    made = World(seed=1, faults=Faults(), pipelines=pipelines, policy="jigsaw")
    made.run_until(lambda: made.scheduler.state.pipelines["b"].version == 8)
    return made


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
    graph = graph_of(world.scheduler.state)
    text = "\n".join(describe(graph))
    assert "forward_backward: " in text
    assert "\nready: " in text
    assert "critical path" in text
    assert played(graph).makespan_s >= graph.critical_path_s()
    page = picture(graph)
    assert page.count("<rect") >= len([node for node in graph.nodes if node.work_s > 0])
    assert "http" not in page, "self-contained"


def test_without_history_there_is_no_graph_yet() -> None:
    world = World(seed=0, faults=Faults(), pipelines=[spec()])
    world.run_until(lambda: world.scheduler.state.pipelines["p"].version == 0)
    with pytest.raises(ValueError, match="nothing is predicted yet"):
        graph_of(world.scheduler.state)
