"""Tenants of machines that vanish, are cut off, or leave with notice live on elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract.message import Worker
from jigsawrl.contract.spec import Device, PipelineSpec
from jigsawrl.core.nodes import SILENCE_S
from jigsawrl.core.policies import POLICIES
from jigsawrl.core.state import Pipeline
from jigsawrl.core.status import pipeline_status
from tests.unit.core.hostile import check_world, drawing, faults
from tests.unit.core.queries import issued
from tests.unit.core.rollouts import num_tokens_of
from tests.unit.core.world import Faults, World, asynchronous, spec

GIB = 1 << 30


def cluster(*pipelines: PipelineSpec, policy: str = "jigsaw", num_machines: int = 2) -> World:
    machines = {f"m{i}": (GIB,) for i in range(num_machines)}
    return World(
        seed=3,
        faults=Faults(),
        pipelines=list(pipelines) or [spec(num_steps=6)],
        policy=policy,
        machines=machines,
    )


def pipeline_of(world: World, name: str = "p") -> Pipeline:
    return world.scheduler.state.pipelines[name]


def waits(world: World) -> str:
    status = pipeline_status(world.scheduler.state, pipeline_of(world))
    return "; ".join(status.waiting_for)


def homes(world: World, name: str = "p") -> dict[str, str | None]:
    return {tenant.id: tenant.node for tenant in pipeline_of(world, name).tenants.values()}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_pipeline_goes_on_where_machines_are_left(policy: str) -> None:
    world = cluster(spec("p", num_steps=6), spec("q", num_steps=6), policy=policy)
    start_s = world.now_s
    world.run_until(lambda: pipeline_of(world).version == 2)
    world.machines.vanish("m0")
    lost_s = world.now_s
    world.run_until(lambda: pipeline_of(world).version == 4)
    assert world.now_s - lost_s < SILENCE_S + 2 * (lost_s - start_s)
    assert set(homes(world).values()) == {"m1"}
    world.run()
    assert [p.stage for p in world.scheduler.state.pipelines.values()] == ["finished", "finished"]
    check_world(world)


def test_a_gang_moves_as_one() -> None:
    machines = {"m0": (GIB, GIB), "m1": (GIB, GIB), "m2": (GIB, GIB)}
    pipeline = spec(num_steps=5, num_trainer_ranks=2)
    world = World(seed=1, faults=Faults(), pipelines=[pipeline], machines=machines)
    world.run_until(lambda: pipeline_of(world).version == 2)
    home = homes(world)["p.trainer0"]
    assert home is not None
    world.machines.vanish(home)
    world.run()
    assert pipeline_of(world).stage == "finished"
    assert homes(world)["p.trainer0"] == homes(world)["p.trainer1"] != home
    check_world(world)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_machine_that_leaves_with_notice_hands_all_over_and_no_token_is_made_twice(
    max_staleness: int,
) -> None:
    world = cluster(asynchronous(max_staleness, num_steps=6, num_rollout_workers=3))
    generating = pipeline_of(world).num_generating
    world.run_until(lambda: pipeline_of(world).version == 2 and len(generating) > 1)
    workers = {n for n, home in homes(world).items() if home == "m1" and "rollout" in n}
    assert workers.intersection(generating)
    world.machines.leave("m1", notice_s=300.0)
    left_s = world.now_s
    world.run_until(lambda: not world.scheduler.state.nodes["m1"].up)
    assert world.now_s - left_s < 2
    assert world.machines.num_released == 1
    assert set(homes(world).values()) == {"m0"}
    world.run()
    assert pipeline_of(world).stage == "finished"
    assert pipeline_of(world).num_tokens_again == 0
    assert pipeline_of(world).num_migrations > 0
    assert all(num == num_tokens_of(name) for name, num in world.num_made.items())
    check_world(world)


def test_a_trainer_of_a_machine_that_leaves_ends_there_before_it_lives_elsewhere() -> None:
    world = cluster(spec(num_steps=6, num_trainer_ranks=2))
    world.machines.end_s = 5.0  # its last checkpoint
    world.run_until(lambda: pipeline_of(world).version == 2)
    home = homes(world)["p.trainer0"]
    assert home is not None
    world.machines.leave(home, notice_s=300.0)
    left_s = world.now_s
    world.run_until(lambda: home not in homes(world).values())
    assert world.now_s - left_s >= 5.0
    assert world.machines.num_released == 0
    world.run()
    assert world.machines.num_released == 1
    assert pipeline_of(world).stage == "finished"
    stops = [o.tenant for o in issued(world, c.StopTenant) if o.worker.id == home]
    assert sorted(t for t in stops if "trainer" in t) == ["p.trainer0", "p.trainer1"], "once each"
    check_world(world)


def test_a_node_that_was_never_let_in_need_not_wait_to_leave() -> None:
    world = cluster()
    world.run_until(lambda: pipeline_of(world).version == 1)
    refused = Worker(id="m9", boot="n99")
    world.publish(e.NodeLeaving(id="l9", node=refused, notice_s=300.0, reason="told to"))

    def answers() -> list[c.ReleaseNode]:
        return [order for order in issued(world, c.ReleaseNode) if order.worker == refused]

    world.run_until(lambda: bool(answers()))
    assert "has not let m9 in" in answers()[0].reason
    world.run()
    assert len(answers()) == 1
    check_world(world)


def test_of_a_machine_that_is_cut_off_and_comes_back_nothing_is_believed() -> None:
    world = cluster()
    world.run_until(lambda: pipeline_of(world).version == 2)
    world.silence(60.0, "m0")
    strays = dict(world.machines.by_name["m0"].running)
    assert strays
    world.run_until(lambda: "m0" not in homes(world).values())
    assert all(process.alive for process in strays.values())
    world.run_until(lambda: not any(process.alive for process in strays.values()))
    stopped = {stop.tenant for stop in issued(world, c.StopTenant) if stop.worker.id == "m0"}
    assert stopped == set(strays)
    world.run()
    check_world(world)


def test_the_late_start_of_a_process_on_a_lost_machine_is_no_start() -> None:
    world = cluster()
    world.run_until(lambda: bool(issued(world, c.StartTenant)))
    start = next(s for s in issued(world, c.StartTenant) if s.worker.id == "m0")
    world.machines.vanish("m0")
    world.run_until(lambda: "m0" not in homes(world).values())
    ghost = e.WorkerStarted(
        id="ghost",
        pipeline="p",
        worker=Worker(id=start.tenant, boot="ghost"),
        role=start.role,
        node="m0",
        device=start.device,
    )
    world.publish(ghost)
    assert pipeline_of(world).tenants[start.tenant].boot != "ghost"
    world.run()
    assert pipeline_of(world).stage == "finished"


def test_without_room_elsewhere_it_waits_for_its_machine_and_says_so() -> None:
    world = cluster(num_machines=1)
    world.run_until(lambda: pipeline_of(world).version == 2)
    world.machines.vanish("m0")
    world.run_until(lambda: not world.scheduler.state.nodes["m0"].up)
    world.run_until(lambda: world.now_s > world.scheduler.state.nodes["m0"].seen_s + 60)
    assert "p.trainer0 or its node m0 to be heard again, or room for it elsewhere" in waits(world)
    world.machines.start("m0")
    world.run()
    assert pipeline_of(world).stage == "finished"
    check_world(world)


def test_a_machine_that_joins_takes_what_was_lost() -> None:
    world = cluster(num_machines=1)
    world.run_until(lambda: pipeline_of(world).version == 2)
    world.machines.vanish("m0")
    world.run_until(lambda: not world.scheduler.state.nodes["m0"].up)
    world.publish(
        e.NodeStarted(
            id="other",
            node=Worker(id="other", boot="o1"),
            devices=(Device("other", 0, "cpu", GIB),),
            runs_id="shared",
        )
    )
    world._tick()
    assert set(homes(world).values()) == {"other"}


def test_a_trainer_stays_where_its_checkpoints_are() -> None:
    world = cluster(num_machines=1)
    world.run_until(lambda: pipeline_of(world).version == 2)
    devices = (Device("far", 0, "cpu", GIB),)
    far = Worker(id="far", boot="f1")
    world.publish(e.NodeStarted(id="far", node=far, devices=devices, runs_id="its own"))
    world.machines.leave("m0", notice_s=0.1)
    world.run_until(lambda: not world.scheduler.state.nodes["m0"].up)
    assert homes(world)["p.trainer0"] == "m0"
    assert homes(world)["p.rollout0"] == "far"
    assert "p.trainer0's node m0 to be started again: no other node sees its runs" in waits(world)
    assert "room for it" not in waits(world)
    world.machines.start("m0")
    world.publish(e.NodeStopped(id="gone", node=far, reason="told to"))
    world.run()
    assert pipeline_of(world).stage == "finished"


def test_a_node_that_bears_the_name_of_another_is_sent_away() -> None:
    world = cluster()
    world.publish(
        e.NodeStarted(
            id="n", node=Worker(id="n", boot="1"), devices=(Device("n", 0, "cpu", 1),), home="a:/x"
        )
    )
    newcomer = Worker(id="n", boot="2")
    world.publish(
        e.NodeStarted(id="n2", node=newcomer, devices=(Device("n", 0, "cpu", 1),), home="b:/x")
    )
    world._tick()
    assert world.scheduler.state.nodes["n"].boot == "1"
    releases = issued(world, c.ReleaseNode)
    assert [release.worker for release in releases] == [newcomer]
    assert "another node is called n" in releases[0].reason


def test_an_older_boot_that_still_lives_is_sent_away() -> None:
    world = cluster()
    old = world.machines.by_name["m0"].node
    world.machines.start("m0")
    world.publish(e.Heartbeat(id="late", node=old))
    world._tick()
    assert [release.worker for release in issued(world, c.ReleaseNode)] == [old]
    world.run()
    assert pipeline_of(world).stage == "finished"


@drawing(40)
@given(
    seed=st.integers(0, 1 << 32),
    policy=st.sampled_from(["jigsaw", "unmanaged", "serial", "rlix", "shuffle"]),
    num_machines=st.integers(2, 3),
    num_ranks=st.integers(1, 2),
    max_staleness=st.integers(0, 2),
    harm=faults(
        lose=[0.05],
        repeat=[0.3],
        kill_per_s=[0.02],
        fail_work=[0.03],
        silence_per_s=[0.02],
        isolate_per_s=[0.02],
        node_restart_per_s=[0.01],
        node_loss_per_s=[0.01, 0.03],
        node_leave_per_s=[0.01, 0.03],
    ),
)
def test_whatever_machines_do_nothing_is_lost_or_trained_twice(
    seed: int, policy: str, num_machines: int, num_ranks: int, max_staleness: int, harm: Faults
) -> None:
    names = ("p", "q")[: 1 + seed % 2]
    pipelines = [
        asynchronous(max_staleness, name=name, num_trainer_ranks=num_ranks) for name in names
    ]
    world = World(
        seed=seed,
        faults=harm,
        pipelines=pipelines,
        policy=policy,
        machines={f"m{i}": (GIB,) * num_ranks for i in range(num_machines)},
    )
    world.run()
    assert all(p.stage == "finished" for p in world.scheduler.state.pipelines.values())
    check_world(world)
