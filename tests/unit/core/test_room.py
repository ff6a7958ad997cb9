"""Memory of devices: nothing is placed where it does not fit, and what fits nowhere is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.contract.events import NodeStarted
from jigsawrl.contract.message import Worker
from jigsawrl.contract.spec import Device, MemorySpec, PipelineSpec
from jigsawrl.core import invariants
from jigsawrl.core.nodes import JOIN_GRACE_S
from jigsawrl.core.policies.placement import Occupancy, place
from jigsawrl.core.state import new_pipeline
from jigsawrl.core.status import pipeline_status
from tests.unit.core.hostile import check_replay, drawing
from tests.unit.core.world import Faults, World, spec

MIB = 1 << 20


def needing(name: str, trainer: int, rollout: int = 1, **changes: object) -> PipelineSpec:
    """MiB a tenant."""
    memory = MemorySpec(trainer=trainer * MIB, rollout=rollout * MIB, evaluation=MIB)
    fields: dict[str, object] = {"evaluation": None, "num_steps": 2, "memory": memory}
    return spec(name, **(fields | changes))


def world(*pipelines: PipelineSpec, policy: str = "jigsaw", mib: tuple[int, ...]) -> World:
    memory_bytes = tuple(one * MIB for one in mib)
    return World(
        seed=0,
        faults=Faults(),
        pipelines=list(pipelines),
        policy=policy,
        memory_bytes=memory_bytes,
    )


def join(of: World, mib: int) -> None:
    """A second machine."""
    devices = (Device("other", 0, "cpu", mib * MIB),)
    node = Worker(id="other", boot="o1")
    of.publish(NodeStarted(id=of.new_id("node"), node=node, devices=devices))


def stages(of: World) -> list[str]:
    return [pipeline.stage for pipeline in of.scheduler.state.pipelines.values()]


def waits(of: World, name: str) -> tuple[str, ...]:
    state = of.scheduler.state
    return pipeline_status(state, state.pipelines[name]).waiting_for


def test_what_fits_on_no_device_is_refused_in_one_line_and_the_others_run_on() -> None:
    run = world(needing("small", 10), needing("big", 200), mib=(100, 80))
    run.run()
    assert stages(run) == ["finished", "failed"]
    failure = run.scheduler.state.pipelines["big"].failure
    assert failure is not None
    for part in ("its trainer needs 200 MiB", "node/cpu0, has 100 MiB", "max_microbatch_tokens"):
        assert part in failure
    assert "\n" not in failure
    invariants.check(run.scheduler.state)


def test_what_fits_only_apart_but_not_together_is_refused_too() -> None:
    run = world(needing("p", 60, 60), mib=(100, 100))
    run.run()
    assert stages(run) == ["failed"]
    assert "trainer 60 MiB, rollout 60 MiB" in (run.scheduler.state.pipelines["p"].failure or "")


def test_what_fits_on_a_machine_that_joins_after_another_waits_for_it() -> None:
    run = world(needing("big", 200), mib=(100,))
    run.later(JOIN_GRACE_S - 1, lambda: join(run, 300))
    run.run_until(lambda: run.now_s > 1000 + JOIN_GRACE_S / 2)
    assert stages(run) == ["queued"]
    assert waits(run, "big")[0].startswith("memory: its trainer needs 200 MiB")
    run.run_until(lambda: stages(run) != ["queued"])
    assert stages(run) == ["starting"]
    check_replay(run)


def test_what_fits_on_no_machine_is_refused_though_they_join_one_after_another() -> None:
    run = world(needing("big", 200), mib=(100,))
    run.later(JOIN_GRACE_S - 1, lambda: join(run, 150))
    run.run_until(lambda: stages(run) != ["queued"])
    assert "other/cpu0, has 150 MiB" in (run.scheduler.state.pipelines["big"].failure or "")


def test_what_fits_later_waits_says_so_and_is_not_overtaken() -> None:
    run = world(needing("a", 70), needing("b", 60), needing("c", 2), mib=(100, 30))
    run.run_until(lambda: stages(run)[0] == "running")
    assert stages(run) == ["running", "queued", "queued"]
    first = waits(run, "b")
    assert first[0].startswith("memory: its trainer needs 60 MiB")
    assert "pipeline a to end" in first
    assert "pipeline b, which is ahead of it, to start" in waits(run, "c")
    run.run()
    assert stages(run) == ["finished"] * 3
    check_replay(run)


def test_a_tenant_goes_where_its_memory_is_though_others_are_emptier() -> None:
    pipeline = new_pipeline(needing("p", 50, 40), b"", gang_epoch=0)
    devices = [Device("n", i, "cpu", size * MIB) for i, size in enumerate((95, 20, 45))]
    places = place(pipeline, devices, Occupancy([]), apart=False)
    assert places is not None
    where = {one.tenant: one.device for one in places if one.device is not None}
    assert where == {"p.trainer0": "n/cpu0", "p.rollout0": "n/cpu2", "p.rollout1": "n/cpu0"}


@pytest.mark.parametrize(
    ("sizes", "needs", "num_rollout_workers"),
    [((10, 6), (5, 9), 1), ((9, 10, 5), (5, 9), 2), ((8, 11, 12), (3, 4), 7)],
)
@pytest.mark.parametrize("apart", [False, True])
def test_small_tenants_leave_large_devices_to_those_that_need_them(
    sizes: tuple[int, ...], needs: tuple[int, int], num_rollout_workers: int, apart: bool
) -> None:
    asked = needing("p", *needs, num_rollout_workers=num_rollout_workers)
    pipeline = new_pipeline(asked, b"", gang_epoch=0)
    devices = [Device("n", i, "cpu", size * MIB) for i, size in enumerate(sizes)]
    occupancy = Occupancy([])
    assert place(pipeline, devices, occupancy, apart=apart) is not None
    assert all(occupancy.free_bytes(device) >= 0 for device in devices)


def test_ranks_of_a_trainer_find_the_machine_that_holds_them_all() -> None:
    pipeline = new_pipeline(needing("p", 50, num_trainer_ranks=2), b"", gang_epoch=0)
    sizes = {"a": (60, 10), "b": (60, 60)}
    devices = [
        Device(node, i, "cpu", size * MIB) for node in sizes for i, size in enumerate(sizes[node])
    ]
    occupancy = Occupancy([])
    places = place(pipeline, devices, occupancy, apart=False)
    assert places is not None
    assert {one.node for one in places if one.role == "trainer"} == {"b"}
    assert occupancy.free_bytes(devices[0]) >= 58 * MIB, "a failed try leaves nothing behind"


@drawing(15)
@given(
    sizes=st.lists(st.integers(10, 100), min_size=1, max_size=3),
    needs=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=4),
    policy=st.sampled_from(["serial", "areal", "unmanaged"]),
    seed=st.integers(0, 1 << 32),
)
def test_placed_tenants_never_exceed_a_device_and_whatever_fits_ends(
    sizes: list[int], needs: list[tuple[int, int]], policy: str, seed: int
) -> None:
    """`invariants.check` looks at every device after every event."""
    pipelines = [needing(f"p{i}", *need, num_steps=1) for i, need in enumerate(needs)]
    run = World(
        seed=seed,
        faults=Faults(kill_per_s=0.02),
        pipelines=pipelines,
        policy=policy,
        memory_bytes=tuple(size * MIB for size in sizes),
    )
    run.run()
    devices = [Device("node", i, "cpu", size * MIB) for i, size in enumerate(sizes)]
    for one in run.scheduler.state.pipelines.values():
        idle = new_pipeline(one.spec, b"", gang_epoch=0)
        fits = place(idle, devices, Occupancy([]), apart=False) is not None
        assert one.stage == ("finished" if fits else "failed"), one.failure
    invariants.check(run.scheduler.state)
