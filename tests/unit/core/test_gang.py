"""A trainer of several ranks: configured together, told the same, ended together."""

from collections.abc import Iterator

import pytest

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract.message import Worker
from jigsawrl.contract.spec import Device
from jigsawrl.core import invariants
from jigsawrl.core.policies.placement import Occupancy, place
from jigsawrl.core.state import new_pipeline
from jigsawrl.core.status import pipeline_status
from tests.unit.core.hostile import check_replay
from tests.unit.core.tenants import Process
from tests.unit.core.test_decisions import issued, pipeline_of
from tests.unit.core.world import Faults, World, spec


@pytest.fixture
def world() -> Iterator[World]:
    """A kind world with the pipeline ``p`` of two ranks."""
    made = World(seed=0, faults=Faults(), pipelines=[spec(num_trainer_ranks=2)])
    yield made
    invariants.check(made.scheduler.state)


def test_ranks_are_placed_round_robin_and_get_every_command(world: World) -> None:
    world.run()
    devices = {s.tenant: s.device for s in issued(world, c.StartTenant) if s.role == "trainer"}
    assert devices == {"p.trainer0": "node/cpu0", "p.trainer1": "node/cpu1"}
    configured = [x for x in issued(world, c.Configure) if "trainer" in x.worker.id]
    assert [(x.gang_epoch, x.rank, x.num_ranks) for x in configured] == [(1, 0, 2), (1, 1, 2)]
    others = [x for x in issued(world, c.Configure) if "trainer" not in x.worker.id]
    assert {(x.rank, x.num_ranks) for x in others} == {(0, 1)}
    cuts = issued(world, c.BatchCut)
    assert [(x.version, x.worker.id) for x in cuts] == [
        (version, f"p.trainer{rank}") for version in range(3) for rank in range(2)
    ]
    assert all(a.groups == b.groups for a, b in zip(cuts[::2], cuts[1::2], strict=True))
    assert {x.worker.id for x in issued(world, c.PublishWeights)} == {"p.trainer0", "p.trainer1"}
    assert world.machines.num_restarts == 0


def test_a_gang_waits_until_all_its_ranks_have_come_up(world: World) -> None:
    world.run_until(lambda: "p.trainer1" in world.processes)
    world.processes["p.trainer1"].alive = False
    world.publish(
        e.WorkerExited(
            id="x",
            pipeline="p",
            worker=world.processes["p.trainer1"].worker,
            exit_code=1,
            reason="no",
        )
    )
    start_s = world.now_s
    world.run_until(lambda: world.now_s > start_s + 5)
    assert not [x for x in issued(world, c.Configure) if "trainer" in x.worker.id]
    status = pipeline_status(world.scheduler.state, pipeline_of(world))
    assert "p.trainer1 to start" in status.waiting_for
    world.spawn_by_hand(world.processes["p.trainer1"].order)
    world.run()
    assert pipeline_of(world).stage == "finished"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", ["configured", "trains", "idles"])
def test_with_one_rank_all_end_and_the_next_gang_has_a_higher_epoch(
    world: World, rank: int, moment: str
) -> None:
    cuts = lambda: len(issued(world, c.BatchCut))  # noqa: E731
    reached = {
        "configured": lambda: pipeline_of(world).gang_epoch == 1,
        "trains": lambda: cuts() == 2,
        "idles": lambda: cuts() == 2 and pipeline_of(world).open_cut is None,
    }
    world.run_until(reached[moment])
    before = dict(world.processes)
    world.kill(world.processes[f"p.trainer{rank}"])
    world.run()
    (restart,) = issued(world, c.RestartTenant)
    survivor = before[f"p.trainer{1 - rank}"]
    assert (restart.tenant, restart.boot) == (survivor.worker.id, survivor.worker.boot)
    assert world.machines.num_restarts == 1
    configured = [x for x in issued(world, c.Configure) if "trainer" in x.worker.id]
    assert [(x.gang_epoch, x.rank) for x in configured] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert pipeline_of(world).stage == "finished"


def test_what_is_left_of_a_gang_on_a_silent_node_is_ended_once_it_is_heard(world: World) -> None:
    world.run_until(lambda: len(issued(world, c.BatchCut)) == 2)
    world.silence(15.0)
    world.run_until(lambda: not world.scheduler.state.nodes["node"].up)
    process = world.processes["p.trainer0"]
    process.alive = False
    world.publish(
        e.WorkerExited(id="x", pipeline="p", worker=process.worker, exit_code=1, reason="no")
    )
    world._tick()
    assert not issued(world, c.RestartTenant)
    world.machines.spawn(process.order)
    world.run()
    assert len(issued(world, c.RestartTenant)) == 1
    assert pipeline_of(world).stage == "finished"


def test_ranks_share_one_machine() -> None:
    pipeline = new_pipeline(spec(num_trainer_ranks=3, num_rollout_workers=3), b"", gang_epoch=0)
    devices = [Device(node, i, "cpu", 1) for node in ("a", "b") for i in range(2)]
    found = place(pipeline, devices, Occupancy([]), apart=False) or ()
    places = {p.tenant: p.device for p in found}
    assert [places[f"p.trainer{i}"] for i in range(3)] == ["a/cpu0", "a/cpu1", "a/cpu0"]
    assert [places[f"p.rollout{i}"] for i in range(3)] == ["b/cpu0", "b/cpu1", "a/cpu1"]


def test_a_trainer_that_nobody_placed_does_not_join_a_gang(world: World) -> None:
    stranger = Worker(id="p.trainer-x", boot="b")
    world.run_until(lambda: pipeline_of(world).gang_epoch == 0)
    before = world.scheduler.state.num_ignored
    world.publish(
        e.WorkerStarted(
            id="s", pipeline="p", worker=stranger, role="trainer", node=None, device=None
        )
    )
    assert world.scheduler.state.num_ignored == before + 1
    world.run()
    assert len(pipeline_of(world).gang) == 2


@pytest.mark.parametrize("moment", ["configured", "trains"])
def test_a_frozen_process_is_killed_and_started_again_with_its_gang(
    world: World, moment: str
) -> None:
    reached = {
        "configured": lambda: pipeline_of(world).gang_epoch == 1,
        "trains": lambda: len(issued(world, c.BatchCut)) == 2,
    }
    world.run_until(reached[moment])
    frozen = [world.processes[name] for name in ("p.trainer1", "p.reward0", "p.rollout0")]
    for process in frozen:
        process.frozen = True
    world.run()
    restarted = {(x.tenant, x.boot) for x in issued(world, c.RestartTenant)}
    assert restarted >= {(process.worker.id, process.worker.boot) for process in frozen}
    assert {tenant for tenant, _ in restarted} >= {"p.trainer0", "p.trainer1"}
    assert pipeline_of(world).stage == "finished"
    check_replay(world)


class Mute(World):
    """The first process of the reward service never says that it is up."""

    def say(self, process: Process, event: e.Event) -> None:
        if process.order.role == "reward" and self.machines.num_restarts == 0:
            return
        super().say(process, event)


def test_a_process_that_never_says_that_it_is_up_is_killed_and_started_again() -> None:
    world = Mute(seed=0, faults=Faults(), pipelines=[spec()])
    world.run()
    (restart,) = issued(world, c.RestartTenant)
    assert (restart.tenant, restart.boot) == ("p.reward0", None)
    assert pipeline_of(world).stage == "finished"
    check_replay(world)
