"""A run under look-ahead whose scheduler is killed twice can be told again from what it left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from jigsawrl.contract.codec import COMMANDS, EVENTS, encode
from jigsawrl.contract.commands import BatchCut, MakeGroups, PlaceSequences, SetShares
from jigsawrl.contract.events import LeaderElected
from jigsawrl.core.scheduler import Scheduler
from services.scheduler.recorded import last_state
from services.scheduler.replay import replay
from services.scheduler.segments import read_segments
from services.scheduler.snapshots import read_snapshot, sequences_on_disk
from tests.integration.live_run import LiveRun, Recording, conserved, record, run_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 16
PIPELINE = """
name = "{name}"
seed = {seed}

[model]
type = "init"
hidden_size = 64
intermediate_size = 128
num_layers = 2
num_heads = 2
num_kv_heads = 1
max_position_embeddings = 128

[task]
type = "sort-digits"
min_digits = 2
max_digits = 3
num_held_out = 50

[rollout]
num_workers = 2
sampling.max_new_tokens = 100
engine.drawn_lengths = {{median_tokens = 12, p95_tokens = 60, max_tokens = 100}}

[algorithm]
group_size = 4

[trainer]
groups_per_batch = 6
num_steps = 16
checkpoint.every = 4

[evaluation]
enabled = false
"""
"""Lengths of a long tail, so that look-ahead has something to decide; nothing is to be learned."""

NAMES = ("tiny", "other")
TEXTS = [PIPELINE.format(name=name, seed=seed) for seed, name in enumerate(NAMES)]

START_S, RUN_S = 240.0, 400.0
"""At most, until the first steps and in all: others may use the cores as well."""

DECISIONS = {MakeGroups, PlaceSequences, BatchCut, SetShares}


class KilledRun:
    """One that ended well all the same."""

    def __init__(self, live: LiveRun, recording: Recording) -> None:
        self.live, self.recording = live, recording
        self.folder = live.run_folder / "scheduler"


def snapshots_with_decisions(folder: Path) -> list[int]:
    """Sequences of those on disk that remember what look-ahead decided."""
    return [
        sequence
        for sequence in sequences_on_disk(folder / "snapshots")
        if num_decisions(read_snapshot(folder / "snapshots", sequence).state)
    ]


def num_decisions(state: bytes) -> int:
    return len(Scheduler.restore(state).state.outlooks.decisions)


def kill_twice(live: LiveRun) -> None:
    """Once when look-ahead has history to decide by. Its successor begins with a snapshot, and is
    killed some steps after that."""
    folder = live.run_folder / "scheduler"
    live.until(lambda: live.num_steps_done() >= 5, timeout_s=START_S)
    live.kill("scheduler")
    live.until(lambda: snapshots_with_decisions(folder), timeout_s=START_S)
    done = live.num_steps_done()
    live.until(lambda: live.num_steps_done() >= done + 2, timeout_s=START_S)
    live.kill("scheduler")


async def record_killed(live: LiveRun) -> Recording:
    recorded, _ = await asyncio.gather(record(live, RUN_S), asyncio.to_thread(kill_twice, live))
    return recorded


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    """Two pipelines on the same slots."""
    folder = tmp_path_factory.mktemp("killed")
    with LiveRun(folder, pipeline=TEXTS[0], others=TEXTS[1:], policy="jigsaw") as live:
        recording = asyncio.run(record_killed(live))
        assert live.wait(RUN_S) == 0, live.story()
        return KilledRun(live, recording)


def test_a_run_whose_scheduler_is_killed_twice_under_look_ahead_ends_well(
    killed: KilledRun,
) -> None:
    pipelines = killed.live.summary()["pipelines"]
    assert {name: p["version"] for name, p in pipelines.items()} == dict.fromkeys(NAMES, NUM_STEPS)
    assert all(conserved(p["groups"]) and conserved(p["sequences"]) for p in pipelines.values())
    assert killed.live.summary()["dead_letters"] == 0
    elected = [
        event
        for event in (EVENTS.decode(e.payload) for e in read_segments(killed.folder / "events"))
        if isinstance(event, LeaderElected)
    ]
    assert len({event.leader for event in elected}) == 3
    assert len(killed.recording.pids["scheduler"]) == 3


def test_every_command_on_the_bus_comes_out_of_the_replay_byte_for_byte(killed: KilledRun) -> None:
    replayed = {command.id: encode(command) for command in replay(killed.folder)}
    live = {COMMANDS.decode(payload).id: payload for payload in killed.recording.commands}
    assert len(live) == len(killed.recording.commands), "one id, one command"
    assert {name: replayed.get(name) for name in live} == live
    kinds = {type(COMMANDS.decode(payload)) for payload in live.values()}
    assert kinds >= DECISIONS
    decided = {
        name for name, payload in replayed.items() if type(COMMANDS.decode(payload)) in DECISIONS
    }
    assert decided <= set(live)


def test_from_every_snapshot_the_replay_agrees_across_the_kills(killed: KilledRun) -> None:
    whole = [encode(command) for command in replay(killed.folder)]
    sequences = sequences_on_disk(killed.folder / "snapshots")
    assert len([s for s in sequences if s in snapshots_with_decisions(killed.folder)]) >= 2
    for after in sequences[:-1]:
        tail = [encode(command) for command in replay(killed.folder, after=after)]
        assert tail == whole[len(whole) - len(tail) :], after
        first = min(int(COMMANDS.decode(payload).id.partition(".")[0]) for payload in tail)
        assert first > after


def test_each_snapshot_of_the_run_is_the_state_of_the_replay_decisions_included(
    killed: KilledRun,
) -> None:
    folder = killed.folder / "snapshots"
    kept = {
        sequence: read_snapshot(folder, sequence).state for sequence in sequences_on_disk(folder)
    }
    scheduler = Scheduler()
    for entry in read_segments(killed.folder / "events"):
        scheduler.handle(
            EVENTS.decode(entry.payload), timestamp_s=entry.timestamp_s, sequence=entry.sequence
        )
        if entry.sequence in kept:
            assert scheduler.snapshot() == kept.pop(entry.sequence), entry.sequence
    assert not kept


def test_why_and_graph_explain_the_run(killed: KilledRun) -> None:
    state = last_state(killed.folder)
    why = run_program("jigsawrl.cli.main", "why", str(killed.live.run_folder))
    assert why.returncode == 0, why.stderr
    decided = [one for one in state.outlooks.decisions if one.shares or one.moves]
    assert decided
    assert f"of {len(decided)} recorded decisions" in why.stdout
    assert "decisions whose steps have ended" in why.stdout
    page = killed.live.run_folder / "graph.html"
    graph = run_program(
        "jigsawrl.cli.main", "graph", str(killed.live.run_folder), "--html", str(page)
    )
    assert graph.returncode == 0, graph.stderr
    for name in NAMES:
        assert f"{name}: finished, version {NUM_STEPS}" in why.stdout
        assert f"{name}/v{NUM_STEPS}/{name}.trainer0/forward_backward: " in graph.stdout
    assert "<svg" in page.read_text()
