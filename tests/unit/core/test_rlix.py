"""The policy `rlix`: one user of a device at a time, training first, and nothing is lost by it."""

from __future__ import annotations

from collections import Counter

from jigsawrl.contract import commands as c
from jigsawrl.contract.spec import PipelineSpec
from jigsawrl.core.policies.rlix import IDLE_SHARE
from jigsawrl.core.state import State
from jigsawrl.core.status import pipeline_status
from tests.unit.core.hostile import check_world
from tests.unit.core.world import Faults, World, spec


def world_of(*pipelines: PipelineSpec, seed: int = 0) -> World:
    return World(seed=seed, faults=Faults(), pipelines=list(pipelines), policy="rlix")


def pair(num_steps: int = 8) -> tuple[PipelineSpec, PipelineSpec]:
    return spec("a", num_steps=num_steps, evaluation=None), spec("b", evaluation=None)


def users(state: State) -> dict[str, list[str]]:
    """Device -> who has more than the share of those that wait."""
    found: dict[str, list[str]] = {}
    for pipeline in state.pipelines.values():
        for tenant in pipeline.tenants.values() if pipeline.active else ():
            if tenant.device is not None and (tenant.share or 0) > 0.5:
                found.setdefault(tenant.device, []).append(tenant.id)
    return found


def test_who_trains_has_its_device_and_generation_of_others_leaves_it() -> None:
    world = world_of(*pair())
    state = world.scheduler.state
    a = lambda: state.pipelines["a"]  # noqa: E731
    world.run_until(lambda: (a().version or 0) >= 2 and a().open_cut is not None)
    device = a().tenants["a.trainer0"].device
    assert device is not None
    world.run_until(lambda: users(state).get(device) == ["a.trainer0"])
    others = [
        t
        for p in state.pipelines.values()
        for t in p.tenants.values()
        if t.device == device and t.id != "a.trainer0"
    ]
    assert others
    assert all(tenant.share == IDLE_SHARE for tenant in others)
    assert not any(
        pipeline.tenants[name].device == device
        for pipeline in state.pipelines.values()
        for name in state.pool.active.get(pipeline.name, ())
    )


def test_a_device_has_one_user_at_every_moment_and_devices_follow_work() -> None:
    world = world_of(*pair(num_steps=4))
    counts: Counter[tuple[int, ...]] = Counter()

    def watch() -> bool:
        state = world.scheduler.state
        active = [name for names in state.pool.active.values() for name in names]
        tenants = {n: t for p in state.pipelines.values() for n, t in p.tenants.items()}
        devices = [tenants[name].device for name in active]
        assert len(set(devices)) == len(devices)
        numbers = tuple(len(state.pool.active.get(name, ())) for name in "ab")
        counts[numbers] += 1
        return not any(p.live for p in state.pipelines.values())

    world.run_until(watch)
    assert counts[1, 1] > 50, "both generate: one device each"
    assert counts[2, 0] > 50, "one generates: it has both"


def test_what_a_shrunk_worker_generates_moves_and_no_token_is_made_twice() -> None:
    world = world_of(*(spec(name, num_steps=10, evaluation=None) for name in "abc"), seed=3)
    world.run()
    state = world.scheduler.state
    statuses = [pipeline_status(state, p) for p in state.pipelines.values()]
    assert [status.state for status in statuses] == ["finished"] * 3
    assert sum(status.num_migrations for status in statuses) > 10
    assert all(status.num_tokens_again == 0 for status in statuses)
    check_world(world)


def test_new_sequences_go_to_workers_that_have_a_device() -> None:
    world = world_of(*pair())
    while any(p.live for p in world.scheduler.state.pipelines.values()):
        before = len(world.issued)
        world.run_until(lambda: len(world.issued) > before)  # noqa: B023
        active = world.scheduler.state.pool.active
        for command in world.issued[-1]:
            if not isinstance(command, c.PlaceSequences):
                continue
            moved = any(placement.resume is not None for placement in command.placements)
            name = command.worker.id
            assert moved or name in active[name[0]] or not active[name[0]]
