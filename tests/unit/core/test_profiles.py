"""The profile that a leader brings: it decides, travels with its election, and needs no file again."""

from __future__ import annotations

import pytest

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract.profile import DeviceProfile, SlowdownProfile, SlowdownRow
from jigsawrl.core import invariants, profiles
from jigsawrl.core.outlook import Decided
from jigsawrl.core.slowdown import CPU_SLOT, TAIL_SEQUENCES
from tests.unit.core.hostile import check_replay
from tests.unit.core.world import Faults, World, spec

PAIR = ("tail_decode", "forward_backward")


def profile(*, beside: float = 0.45, tail: int = 8) -> DeviceProfile:
    """On halves, decoding and training run at `beside` next to each other."""
    rows = tuple(
        SlowdownRow(kind=one, share=0.5, beside=other, beside_share=0.5, speed=beside)
        for one, other in (PAIR, PAIR[::-1])
    )
    slowdown = SlowdownProfile(device_kind="cpu", source="made up", rows=rows)
    return DeviceProfile(slowdown=slowdown, tail_sequences=tail)


def ran(adopted: DeviceProfile | None, *, num_steps: int = 8) -> World:
    pipelines = [spec(name, num_steps=num_steps, evaluation=None) for name in ("a", "b", "c")]
    world = World(seed=4, faults=Faults(), pipelines=pipelines, policy="jigsaw", profile=adopted)
    world.run()
    return world


def decisions(world: World) -> list[Decided]:
    return world.scheduler.state.outlooks.decisions


@pytest.fixture(scope="module")
def usual() -> World:
    return ran(profile())


def test_twice_the_slowdown_beside_another_changes_decisions(usual: World) -> None:
    costly = ran(profile(beside=0.225))
    assert decisions(costly) != decisions(usual)
    shares = [
        [one.shares for one in (x for b in world.issued for x in b) if isinstance(one, c.SetShares)]
        for world in (usual, costly)
    ]
    assert shares[0] != shares[1]


def test_a_replay_needs_no_file(usual: World) -> None:
    assert usual.scheduler.state.profile == profile()
    check_replay(usual)
    invariants.check(usual.scheduler.state)


def test_without_a_profile_the_built_in_table_decides() -> None:
    world = ran(None, num_steps=2)
    assert profiles.table(world.scheduler.state).profile is CPU_SLOT
    told = {x.tail_sequences for b in world.issued for x in b if isinstance(x, c.Configure)}
    assert told == {TAIL_SEQUENCES["cpu"]}


def test_workers_count_tails_as_the_scheduler_does_also_after_another_election() -> None:
    world = World(
        seed=0,
        faults=Faults(kill_per_s=0.05),
        pipelines=[spec("a", num_steps=4)],
        policy="serial",
        profile=profile(tail=3),
    )
    states = world.scheduler.state.pipelines
    world.run_until(lambda: states["a"].stage == "running")
    elected = e.LeaderElected(
        id="l2", leader="t", code_version="1", policy="serial", profile=profile(tail=5)
    )
    world.publish(elected)
    world.publish(e.LeaderElected(id="l3", leader="u", code_version="1", policy="serial"))
    later = spec("b", num_steps=1)
    world.publish(e.PipelineSubmitted(id="b", pipeline="b", spec=later, config=b"config"))
    world.run()
    told: dict[str, set[int | None]] = {}
    for command in (one for batch in world.issued for one in batch):
        if isinstance(command, c.Configure):
            pipeline = command.worker.id.partition(".")[0]
            told.setdefault(pipeline, set()).add(command.tail_sequences)
    assert told == {"a": {3}, "b": {5}}
    assert [states[name].tail_sequences for name in "ab"] == [3, 5]
    check_replay(world)
