"""A user's pause: nothing more begins, what runs ends, nothing is lost, and others have the devices."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.core.status import pipeline_status
from tests.unit.core.hostile import check_world, drawing, faults
from tests.unit.core.queries import issued, pipeline_of
from tests.unit.core.world import KIND, Faults, World, asynchronous, spec

BEGINNINGS = (c.PlaceSequences, c.BatchCut, c.Evaluate)


def num_begun(world: World, name: str) -> int:
    """Commands of a pipeline that begin work on a device."""
    return sum(
        command.worker.id.startswith(f"{name}.")
        for kind in BEGINNINGS
        for command in issued(world, kind)
    )


def pause(world: World, name: str = "p") -> None:
    world.publish(e.PipelinePaused(id=world.new_id("pause"), pipeline=name))


def resume(world: World, name: str = "p") -> None:
    world.publish(e.PipelineResumed(id=world.new_id("resume"), pipeline=name))


def wait(world: World, seconds: float) -> None:
    until_s = world.now_s + seconds
    world.run_until(lambda: world.now_s >= until_s)


@pytest.mark.parametrize("policy", ["serial", "unmanaged", "jigsaw", "rlix"])
@pytest.mark.parametrize("after", ["GroupsMade", "SequencesFinished", "SequencesRewarded"])
def test_while_paused_nothing_begins_and_what_runs_ends(policy: str, after: str) -> None:
    world = World(seed=1, faults=KIND, pipelines=[spec()], policy=policy)
    world.run_until(lambda: pipeline_of(world).version == 1)
    heard = len(world.log)
    world.run_until(lambda: any(type(x).__name__ == after for x, *_ in world.log[heard:]))
    pause(world)
    begun = num_begun(world, "p")
    wait(world, 60)
    assert num_begun(world, "p") == begun
    pipeline = pipeline_of(world)
    assert not any(pipeline.num_generating.values())
    status = pipeline_status(world.scheduler.state, pipeline)
    assert status.paused
    assert status.waiting_for == ("its user: jigsaw resume p",)
    resume(world)
    world.run()
    assert pipeline_of(world).stage == "finished"
    assert pipeline_status(world.scheduler.state, pipeline_of(world)).num_tokens_again == 0
    check_world(world)


def test_under_serial_the_next_pipeline_goes_on_while_the_first_is_paused() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec("a"), spec("b")])
    world.run_until(lambda: pipeline_of(world, "a").version == 1)
    pause(world, "a")
    world.run_until(lambda: pipeline_of(world, "b").stage == "finished")
    assert pipeline_of(world, "a").version in (1, 2)
    resume(world, "a")
    world.run()
    assert pipeline_of(world, "a").stage == "finished"
    check_world(world)


def test_a_pause_of_an_earlier_submission_is_ignored() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec()])
    world.run_until(lambda: pipeline_of(world).version == 1)
    world.publish(e.PipelinePaused(id="x", pipeline="p", submission="of another"))
    assert not pipeline_of(world).paused
    world.run()
    assert pipeline_of(world).stage == "finished"


def test_a_paused_pipeline_can_be_cancelled() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec()])
    world.run_until(lambda: pipeline_of(world).version == 1)
    pause(world)
    world.publish(e.PipelineCancelled(id="x", pipeline="p", reason="enough"))
    world.run()
    assert pipeline_of(world).failure == "cancelled: enough"


@drawing(15)
@given(
    seed=st.integers(0, 1 << 32),
    policy=st.sampled_from(["serial", "unmanaged", "jigsaw"]),
    max_staleness=st.integers(0, 1),
    waits_s=st.lists(st.floats(0.1, 20.0), min_size=2, max_size=8),
    harm=faults(lose=(0.05,), kill_per_s=(0.02,), node_restart_per_s=(0.01,)),
)
def test_pauses_in_a_hostile_world_lose_nothing(
    seed: int, policy: str, max_staleness: int, waits_s: list[float], harm: Faults
) -> None:
    pipelines = [msgspec.structs.replace(asynchronous(max_staleness), name="a"), spec("b")]
    world = World(seed=seed, faults=harm, pipelines=pipelines, policy=policy)
    for number, wait_s in enumerate(waits_s):
        if any(p.live for p in world.scheduler.state.pipelines.values()):
            wait(world, wait_s)
            (pause, resume)[number % 2](world, "a")
    resume(world, "a")
    world.run()
    assert [p.stage for p in world.scheduler.state.pipelines.values()] == ["finished"] * 2
    check_world(world)
