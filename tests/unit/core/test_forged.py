"""Events that no service of ours would publish, from whoever reaches the bus or from a broken worker:
whatever they say, the scheduler, which all pipelines share, goes on."""

from __future__ import annotations

import math
from random import Random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import SubStageKind, Worker
from jigsawrl.contract.spec import Device, EvaluationSpec, TermsSpec
from jigsawrl.core.gathering import Work
from jigsawrl.core.nodes import MAX_DEVICES
from jigsawrl.core.work_history import Sum, left_s
from tests.unit.core.hostile import check_history, check_replay
from tests.unit.core.world import Faults, World, asynchronous, spec

SECONDS = (0.0, 5e-324, 0.5, 3e4, 1e9, 1.7e308, math.inf, math.nan, -1.0, -1.7e308, -math.inf)
COUNTS = (0, 1, 7, 2**53)


def of_version(world: World) -> World:
    """Until both pipelines have published."""
    pipelines = world.scheduler.state.pipelines
    world.run_until(lambda: all(p.version is not None for p in pipelines.values()))
    return world


def spans(random: Random, *, version: int) -> tuple[parts.SubStage, ...]:
    return tuple(
        parts.SubStage(
            kind=random.choice(get_args(SubStageKind)),
            version=max(0, version + random.choice((-1, 0, 0, 1))),
            started_s=random.choice(SECONDS),
            ended_s=random.choice(SECONDS),
            duration_s=random.choice(SECONDS),
            num_iterations=random.choice(COUNTS),
            num_tokens=random.choice(COUNTS),
            cpu_s=random.choice((None, *SECONDS)),
        )
        for _ in range(8)
    )


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 32))
def test_whatever_workers_tell_of_their_work_every_pipeline_ends_and_replays(seed: int) -> None:
    random = Random(seed)
    pipelines = [spec("a", num_steps=5), asynchronous(1, name="b", num_steps=5)]
    world = World(seed=seed, faults=Faults(), pipelines=pipelines, policy="jigsaw")

    def forge() -> None:
        for name, pipeline in world.scheduler.state.pipelines.items():
            for tenant in [t for t in pipeline.tenants.values() if t.boot is not None]:
                told = spans(random, version=pipeline.version or 0)
                worker, tag = tenant.worker, world.new_id("forged")
                world.publish(e.SubStagesEnded(id=tag, pipeline=name, worker=worker, spans=told))

    world.every(1.0, forge)
    world.run()
    state = world.scheduler.state
    assert [p.stage for p in state.pipelines.values()] == ["finished"] * 2
    assert state.num_ignored > 0
    check_history(world)
    check_replay(world)


def test_the_rest_of_a_sub_stage_of_which_almost_nothing_was_expected_is_finite() -> None:
    work = Work(work_s=5e-324, num_iterations=1.0, num_tokens=2.0**53)
    left = left_s(work, Sum(work_s=1.0, num_iterations=1.0, num_tokens=1.0))
    assert 0 <= left < math.inf


def test_tokens_of_versions_that_are_not_published_fail_their_sequence_with_a_reason() -> None:
    world = of_version(World(seed=3, faults=Faults(), pipelines=[spec("a")]))
    world.run_until(lambda: any(process.held for process in world.processes.values()))
    process = next(p for p in world.processes.values() if p.held)
    pipeline = world.scheduler.state.pipelines["a"]
    for name, epoch in list(process.held.items())[:2]:
        finish = parts.SequenceFinish(
            sequence=name,
            epoch=epoch,
            ref=world.new_ref(),
            finish_reason="stop",
            num_tokens=3,
            min_version=0,
            max_version=2**53,
        )
        finished = e.SequencesFinished(
            id=world.new_id("forged"), pipeline="a", worker=process.worker, finished=(finish,)
        )
        world.publish(finished)
    failed = [s for g in pipeline.groups.values() for s in g.sequences if s.stage == "failed"]
    assert failed or "versions 0 to 9007199254740992" in pipeline.last_group_failure
    world.run()
    assert pipeline.stage == "finished"
    check_history(world)


def test_a_machine_can_not_register_the_devices_of_another_or_one_of_its_own_twice() -> None:
    world = of_version(World(seed=4, faults=Faults(), pipelines=[spec("a")]))
    state = world.scheduler.state
    other, own = (Device(node, 0, "cpu", 1 << 40) for node in ("node", "evil"))
    many = tuple(Device("evil", index, "cpu", 1 << 40) for index in range(MAX_DEVICES + 1))
    for devices in ((other,), (own, own), (own, other), many):
        node = Worker(id="evil", boot=world.new_id("boot"))
        tag = world.new_id("forged")
        world.publish(e.NodeStarted(id=tag, node=node, devices=devices))
    assert list(state.nodes) == ["node"]
    world.run()
    assert state.pipelines["a"].stage == "finished"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "b\n"},
        {"name": "../b"},
        {"num_steps": 0},
        {"groups_per_batch": 0},
        {"groups_per_batch": 2**53},
        {"group_size": 0},
        {"group_size": 2**53},
        {"min_group_size": 0},
        {"num_rollout_workers": 0},
        {"num_rollout_workers": 2**53},
        {"num_trainer_ranks": 0},
        {"num_trainer_ranks": 2**53},
        {"pipeline_depth": 0},
        {"evaluation": EvaluationSpec(every=0)},
        {"terms": TermsSpec(weight=math.nan)},
        {"terms": TermsSpec(weight=0.0)},
        {"terms": TermsSpec(max_slowdown=-1.0)},
        {"terms": TermsSpec(max_slowdown=math.inf)},
    ],
    ids=str,
)
def test_a_pipeline_for_which_nothing_can_be_decided_is_ignored(change: dict[str, Any]) -> None:
    world = World(seed=5, faults=Faults(), pipelines=[spec("a", num_steps=2)], policy="jigsaw")
    forged = msgspec.structs.replace(spec("b"), **change)
    tag = world.new_id("forged")
    world.publish(e.PipelineSubmitted(id=tag, pipeline="b", spec=forged, config=b""))
    world.run()
    pipelines = world.scheduler.state.pipelines
    assert {name: pipeline.stage for name, pipeline in pipelines.items()} == {"a": "finished"}
    check_history(world)
