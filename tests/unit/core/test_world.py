"""The scheduler drives simulated worlds, kind and hostile, to their end."""

from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jigsawrl.contract.commands import Command
from jigsawrl.core import invariants
from jigsawrl.core.policies.serial import Serial
from jigsawrl.core.scheduler import Scheduler
from jigsawrl.core.status import pipeline_status
from tests.unit.core.world import Faults, World, spec


def encoded(issued: list[list[Command]]) -> list[bytes]:
    return [msgspec.msgpack.encode(commands) for commands in issued]


def check_history(world: World) -> None:
    """Each trained group stands in exactly one cut of the surviving history."""
    for pipeline in world.scheduler.state.pipelines.values():
        last: dict[int, tuple[str, ...]] = {}
        for cut in world.cuts:
            if cut.worker.id.startswith(f"{pipeline.name}."):
                last[cut.version] = tuple(group.group for group in cut.groups)
                assert all(len(group.sequences) >= 2 for group in cut.groups)
        numbers = Counter(int(g.rpartition("/g")[2]) for cut in last.values() for g in cut)
        assert set(numbers.values()) == {1}
        assert sorted(numbers) == pipeline.group_fates["trained"].numbers()


def check_replay(world: World) -> None:
    fresh = Scheduler(policy=Serial())
    replayed = [fresh.handle(e, timestamp_s=t, sequence=s) for e, t, s in world.log]
    assert encoded(replayed) == encoded(world.issued)
    for sequence, snapshot in list(world.snapshots.items())[::7]:
        restored = Scheduler.restore(snapshot, policy=Serial())
        tail = [restored.handle(e, timestamp_s=t, sequence=s) for e, t, s in world.log[sequence:]]
        assert encoded(tail) == encoded(world.issued[sequence:])
        assert restored.snapshot() == world.scheduler.snapshot()


def test_a_kind_world_trains_every_step_once_and_replays() -> None:
    world = World(seed=0, faults=Faults(), pipelines=[spec("a"), spec("b", evaluation=None)])
    world.run()
    for pipeline in world.scheduler.state.pipelines.values():
        status = pipeline_status(world.scheduler.state, pipeline)
        assert status.state == "finished"
        assert (status.version, status.groups.trained, status.groups.admitted) == (3, 9, 9)
        assert status.sequences.trained == 27
        assert status.num_trained_tokens == 300
        assert status.running_s > 0
    evaluated = [r.version for r in world.scheduler.state.pipelines["a"].evaluations]
    assert evaluated[0] == 0
    assert evaluated[-1] == 3
    check_history(world)
    check_replay(world)
    invariants.check(world.scheduler.state)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 32),
    lose=st.sampled_from([0.0, 0.05, 0.3]),
    repeat=st.sampled_from([0.0, 0.3]),
    kill=st.sampled_from([0.0, 0.02, 0.05]),
    fail=st.sampled_from([0.0, 0.05]),
    silence=st.sampled_from([0.0, 0.01]),
    restart=st.sampled_from([0.0, 0.01]),
)
def test_a_hostile_world_keeps_conservation_and_replays(
    seed: int, lose: float, repeat: float, kill: float, fail: float, silence: float, restart: float
) -> None:
    faults = Faults(
        lose=lose,
        repeat=repeat,
        kill_per_s=kill,
        fail_work=fail,
        silence_per_s=silence,
        node_restart_per_s=restart,
    )
    world = World(seed=seed, faults=faults, pipelines=[spec("a"), spec("b")])
    world.run()
    for pipeline in world.scheduler.state.pipelines.values():
        status = pipeline_status(world.scheduler.state, pipeline)
        assert status.state == "finished", status.failure
        assert status.groups.trained == 9
        assert status.groups.in_flight == 0
    check_history(world)
    check_replay(world)
    invariants.check(world.scheduler.state)


@pytest.mark.parametrize("seed", range(3))
def test_a_trainer_that_dies_often_rolls_back_and_still_ends(seed: int) -> None:
    world = World(seed=seed, faults=Faults(kill_per_s=0.08), pipelines=[spec("a", num_steps=6)])
    world.run()
    pipeline = world.scheduler.state.pipelines["a"]
    assert pipeline.stage == "finished"
    check_history(world)
    check_replay(world)
    invariants.check(world.scheduler.state)
