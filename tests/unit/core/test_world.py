"""The scheduler drives simulated worlds, kind and hostile, to their end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.contract.requests import PipelineStatus
from jigsawrl.contract.spec import DynamicSamplingSpec, EvaluationSpec
from jigsawrl.core import invariants
from jigsawrl.core.status import pipeline_status
from tests.unit.core.hostile import check_world, drawing, encoded, faults
from tests.unit.core.world import Faults, World, asynchronous, spec


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
    check_world(world)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_async_trains_every_step_once_within_its_bound(max_staleness: int) -> None:
    pipeline = asynchronous(max_staleness, num_steps=8)
    world = World(seed=1, faults=Faults(), pipelines=[pipeline])
    world.run()
    status = pipeline_status(world.scheduler.state, world.scheduler.state.pipelines["p"])
    assert (status.state, status.version) == ("finished", 8)
    assert (status.groups.trained, status.groups.admitted) == (24, 24), "nothing is thrown away"
    check_world(world)


def test_async_with_staleness_0_gives_the_commands_of_sync() -> None:
    worlds = [
        World(seed=2, faults=Faults(), pipelines=[pipeline])
        for pipeline in (spec(), asynchronous(0))
    ]
    for world in worlds:
        world.run()
    assert encoded(worlds[0].issued) == encoded(worlds[1].issued)


@drawing(25)
@given(
    seed=st.integers(0, 1 << 32),
    max_staleness=st.integers(0, 3),
    depth=st.integers(1, 4),
    bound=st.integers(0, 3),
    harm=faults(kill_per_s=[0.02, 0.05], lose=[0.1], fail_work=[0.05], node_restart_per_s=[0.01]),
)
def test_a_hostile_world_keeps_every_bound_in_async(
    seed: int, max_staleness: int, depth: int, bound: int, harm: Faults
) -> None:
    pipeline = asynchronous(
        max_staleness, sample_bound=bound, pipeline_depth=min(depth, max_staleness + 1), num_steps=5
    )
    world = World(seed=seed, faults=harm, pipelines=[pipeline])
    world.run()
    status = pipeline_status(world.scheduler.state, world.scheduler.state.pipelines["p"])
    assert status.state == "finished", status.failure
    assert (status.groups.trained, status.num_trained_tokens) == (15, 500)
    if bound >= max_staleness:
        assert status.groups.stale == 0, "a group only moves forward in the queue"
    check_world(world)


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("rule", ["fail", "keep", "train_smaller"])
def test_dynamic_sampling_trains_no_uniform_group_before_its_rule_applies(
    rule: str, max_staleness: int
) -> None:
    sampling = DynamicSamplingSpec(max_batches=50, when_exhausted=rule)
    pipeline = asynchronous(max_staleness, dynamic_sampling=sampling, num_steps=6)
    world = World(seed=3, faults=Faults(uniform_rewards=0.6), pipelines=[pipeline])
    world.run()
    status = pipeline_status(world.scheduler.state, world.scheduler.state.pipelines["p"])
    assert status.state == "finished", status.failure
    assert status.groups.trained == 18
    assert status.groups.filtered > 5
    check_world(world)


def run_out(rule: str, uniform_rewards: float) -> PipelineStatus:
    sampling = DynamicSamplingSpec(max_batches=1, when_exhausted=rule)
    pipeline = asynchronous(0, dynamic_sampling=sampling)
    world = World(seed=5, faults=Faults(uniform_rewards=uniform_rewards), pipelines=[pipeline])
    world.run()
    invariants.check(world.scheduler.state)
    return pipeline_status(world.scheduler.state, world.scheduler.state.pipelines["p"])


def test_when_prompts_run_out_the_pipeline_fails_with_the_number() -> None:
    status = run_out("fail", 1.0)
    assert status.state == "failed"
    assert "step 0: 3 groups in a row had equal rewards" in (status.failure or "")


def test_when_prompts_run_out_uniform_groups_may_be_kept() -> None:
    status = run_out("keep", 1.0)
    assert (status.state, status.groups.trained, status.groups.filtered) == ("finished", 9, 9)


def test_when_prompts_run_out_a_smaller_batch_may_be_trained() -> None:
    status = run_out("train_smaller", 0.6)
    assert (status.state, status.version) == ("finished", 3)
    assert 3 <= status.groups.trained < 9


def test_a_smaller_batch_has_one_group_at_least() -> None:
    status = run_out("train_smaller", 1.0)
    assert status.state == "failed"
    assert "no group of 5 has unequal rewards" in (status.failure or "")


@drawing(25)
@given(
    seed=st.integers(0, 1 << 32),
    harm=faults(
        lose=[0.05, 0.3],
        repeat=[0.3],
        kill_per_s=[0.02, 0.05],
        fail_work=[0.05],
        silence_per_s=[0.01],
        node_restart_per_s=[0.01],
    ),
)
def test_a_hostile_world_keeps_conservation_and_replays(seed: int, harm: Faults) -> None:
    world = World(seed=seed, faults=harm, pipelines=[spec("a"), spec("b")])
    world.run()
    for pipeline in world.scheduler.state.pipelines.values():
        status = pipeline_status(world.scheduler.state, pipeline)
        assert status.state == "finished", status.failure
        assert (status.groups.trained, status.num_trained_tokens) == (9, 300)
        assert status.groups.in_flight == 0
    check_world(world)


@drawing(25)
@given(
    seed=st.integers(0, 1 << 32),
    num_ranks=st.integers(2, 3),
    max_staleness=st.integers(0, 2),
    harm=faults(
        lose=[0.1],
        repeat=[0.3],
        kill_per_s=[0.02, 0.05],
        silence_per_s=[0.01],
        node_restart_per_s=[0.01],
    ),
)
def test_a_gang_lives_and_dies_as_one_in_a_hostile_world(
    seed: int, num_ranks: int, max_staleness: int, harm: Faults
) -> None:
    pipeline = asynchronous(max_staleness, num_trainer_ranks=num_ranks, num_steps=5)
    world = World(seed=seed, faults=harm, pipelines=[pipeline])
    world.run()
    status = pipeline_status(world.scheduler.state, world.scheduler.state.pipelines["p"])
    assert status.state == "finished", status.failure
    assert (status.groups.trained, status.groups.in_flight) == (15, 0)
    check_world(world)


def test_a_group_with_one_survivor_is_trained_where_the_baseline_is_not_its_own() -> None:
    num_alone = 0
    for seed in range(6):
        pipeline = spec(min_group_size=1, num_steps=4)
        world = World(seed=seed, faults=Faults(fail_work=0.3), pipelines=[pipeline])
        world.run()
        assert world.scheduler.state.pipelines["p"].stage == "finished"
        sizes = [len(group.sequences) for cut in world.cuts for group in cut.groups]
        num_alone += sizes.count(1)
        invariants.check(world.scheduler.state)
    assert num_alone > 3


@pytest.mark.parametrize("seed", range(3))
def test_a_trainer_that_dies_often_rolls_back_and_still_ends(seed: int) -> None:
    world = World(seed=seed, faults=Faults(kill_per_s=0.08), pipelines=[spec("a", num_steps=6)])
    world.run()
    pipeline = world.scheduler.state.pipelines["a"]
    assert pipeline.stage == "finished"
    check_world(world)


def test_each_version_is_evaluated_or_skipped_once_whatever_is_rolled_back() -> None:
    evaluation = EvaluationSpec(every=1)
    num_rollbacks = 0
    for seed in range(8):
        faults = Faults(kill_per_s=0.05)
        pipeline = spec(num_steps=6, evaluation=evaluation)
        world = World(seed=seed, faults=faults, pipelines=[pipeline])
        world.checkpoint_every = 100
        world.run()
        state = world.scheduler.state.pipelines["p"]
        num_rollbacks += state.incarnation
        evaluated = [result.version for result in state.evaluations]
        assert sorted(evaluated + state.evaluations_skipped) == list(range(7))
        invariants.check(world.scheduler.state)
    assert num_rollbacks > 8
