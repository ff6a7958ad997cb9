"""Worlds in which sequences move all the time, kind and hostile: nothing is lost, doubled or stuck."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jigsawrl.contract import commands as c
from jigsawrl.core.policies.shuffle import MAX_MOVES, Shuffle
from jigsawrl.core.status import pipeline_status
from tests.unit.core.hostile import check_world, drawing, faults
from tests.unit.core.movers import Merging, RandomMoves
from tests.unit.core.rollouts import num_tokens_of
from tests.unit.core.world import Faults, World, asynchronous


def check_tokens(world: World) -> None:
    """What is trained is whole, and is the record of its sequence."""
    for cut in world.cuts:
        for group in cut.groups:
            for sequence in group.sequences:
                made = world.records[sequence.record]
                assert made.sequence == sequence.sequence
                assert made.num_tokens == num_tokens_of(sequence.sequence)


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("policy", [RandomMoves(0.2), Shuffle(), Merging()])
def test_in_a_kind_world_no_token_is_made_twice(policy: RandomMoves, max_staleness: int) -> None:
    pipeline = asynchronous(max_staleness, num_steps=6, num_rollout_workers=3)
    world = World(seed=4, faults=Faults(), pipelines=[pipeline], policy=policy)
    world.run()
    status = pipeline_status(world.scheduler.state, world.scheduler.state.pipelines["p"])
    assert (status.state, status.groups.trained, status.groups.admitted) == ("finished", 18, 18)
    assert status.num_migrations > (10 if isinstance(policy, Merging) else 150)
    assert status.num_migrated_tokens > 0
    assert status.num_tokens_again == 0
    assert len(world.num_made) == 54
    assert all(num == num_tokens_of(name) for name, num in world.num_made.items())
    if isinstance(policy, Shuffle):
        assert status.num_migrations <= 54 * MAX_MOVES
    check_tokens(world)
    check_world(world)


@drawing(25)
@given(
    seed=st.integers(0, 1 << 32),
    merges=st.booleans(),
    max_staleness=st.integers(0, 2),
    num_workers=st.integers(2, 4),
    harm=faults(
        lose=[0.05, 0.2],
        repeat=[0.3],
        kill_per_s=[0.02, 0.05],
        fail_work=[0.03],
        silence_per_s=[0.01],
        node_restart_per_s=[0.01],
        isolate_per_s=[0.02, 0.1],
    ),
)
@example(
    seed=2,
    merges=True,
    max_staleness=2,
    num_workers=2,
    harm=Faults(lose=0.05, isolate_per_s=0.02),
)
@example(
    seed=820377,
    merges=False,
    max_staleness=2,
    num_workers=2,
    harm=Faults(
        kill_per_s=0.02,
        fail_work=0.03,
        silence_per_s=0.01,
        node_restart_per_s=0.01,
        isolate_per_s=0.1,
    ),
)
def test_a_hostile_world_in_which_sequences_move_keeps_every_bound_and_replays(
    seed: int, merges: bool, max_staleness: int, num_workers: int, harm: Faults
) -> None:
    pipeline = asynchronous(max_staleness, num_steps=4, num_rollout_workers=num_workers)
    policy = Merging() if merges else RandomMoves()
    world = World(seed=seed, faults=harm, pipelines=[pipeline], policy=policy)
    world.run()
    status = pipeline_status(world.scheduler.state, world.scheduler.state.pipelines["p"])
    assert status.state == "finished", status.failure
    assert (status.groups.trained, status.groups.in_flight) == (12, 0)
    assert any(isinstance(x, c.MigrateSequences) for batch in world.issued for x in batch) or merges
    check_tokens(world)
    check_world(world)
