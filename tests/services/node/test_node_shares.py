"""How a node divides its devices: `Shares` with a simulated actuator."""

from __future__ import annotations

import pytest

from jigsawrl.contract.parts import AppliedShare
from jigsawrl.devices.simulated import SimulatedActuator
from services.node.shares import Report, Shares

CPU0, CPU1 = "n/cpu0", "n/cpu1"


class Machine:
    """Two slots, and the processes that a test says run."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.actuator = SimulatedActuator()
        self.shares = Shares({CPU0: self.actuator, CPU1: self.actuator}, pid_of=self.pids.get)

    async def start(self, tenant: str, *, pid: int) -> None:
        self.pids[tenant] = pid
        await self.shares.started(tenant)

    def reports(self) -> list[Report]:
        queue = self.shares.reports
        return [queue.get_nowait() for _ in range(queue.qsize())]


@pytest.fixture
def machine() -> Machine:
    return Machine()


def entry(tenant: str, share: float) -> AppliedShare:
    return AppliedShare(tenant=tenant, asked=share, applied=share)


async def test_a_tenants_first_share_holds_once_its_process_runs(machine: Machine) -> None:
    machine.shares.add("p.trainer0", device=CPU0, share=0.5)
    assert machine.actuator.divided == {}
    await machine.start("p.trainer0", pid=7)
    assert machine.actuator.divided == {CPU0: {"p.trainer0": (7, 0.5)}}
    (report,) = machine.reports()
    assert (report.cause, report.device, report.mechanism) == ("", CPU0, "simulated")
    assert report.shares == (entry("p.trainer0", 0.5),)


async def test_a_tenants_next_process_gets_its_share_and_an_order_reaches_who_runs(
    machine: Machine,
) -> None:
    machine.shares.add("p.trainer0", device=CPU0, share=0.5)
    await machine.start("p.trainer0", pid=7)
    await machine.shares.divide(CPU0, {"p.trainer0": 0.75, "q.rollout0": 0.25}, cause="9.0")
    assert machine.actuator.divided[CPU0] == {"p.trainer0": (7, 0.75)}
    await machine.start("p.trainer0", pid=8)
    await machine.start("q.rollout0", pid=9)
    assert machine.actuator.divided[CPU0] == {"p.trainer0": (8, 0.75), "q.rollout0": (9, 0.25)}
    reports = machine.reports()
    assert [report.cause for report in reports] == ["", "9.0", "", ""]
    assert reports[-1].shares == (entry("p.trainer0", 0.75), entry("q.rollout0", 0.25))


async def test_who_is_stopped_makes_room_at_once(machine: Machine) -> None:
    for name, pid in (("p.trainer0", 7), ("p.rollout0", 8)):
        machine.shares.add(name, device=CPU0, share=0.5)
        await machine.start(name, pid=pid)
    machine.shares.remove("p.rollout0")
    machine.shares.add("q.rollout0", device=CPU0, share=0.5)
    await machine.start("q.rollout0", pid=9)
    assert set(machine.actuator.divided[CPU0]) == {"p.trainer0", "q.rollout0"}
    machine.shares.remove("q.rollout0")
    await machine.shares.let_go()
    assert set(machine.actuator.divided[CPU0]) == {"p.trainer0"}


@pytest.mark.parametrize(
    ("device", "shares", "reason"),
    [
        (CPU0, {"p.trainer0": 0.75, "q.trainer0": 0.5}, "shares sum to 1.25"),
        (CPU0, {"p.trainer0": float("nan")}, "not between 0 and 1"),
        ("n/cpu7", {"p.trainer0": 1.0}, "no device n/cpu7 here, only n/cpu0, n/cpu1"),
    ],
)
async def test_an_order_that_is_no_division_is_answered_and_changes_nothing(
    machine: Machine, device: str, shares: dict[str, float], reason: str
) -> None:
    machine.shares.add("p.trainer0", device=CPU0, share=0.5)
    await machine.start("p.trainer0", pid=7)
    machine.reports()
    await machine.shares.divide(device, shares, cause="9.0")
    (report,) = machine.reports()
    assert (report.cause, report.shares, report.mechanism) == ("9.0", (), "none")
    assert reason in (report.fell_back or "")
    assert machine.actuator.divided == {CPU0: {"p.trainer0": (7, 0.5)}}


async def test_an_actuator_serves_all_its_devices_and_is_restored_once(machine: Machine) -> None:
    for index, device in enumerate((CPU0, CPU1)):
        machine.shares.add(f"p.rollout{index}", device=device, share=1.0)
        await machine.start(f"p.rollout{index}", pid=7 + index)
    assert set(machine.actuator.divided) == {CPU0, CPU1}
    await machine.shares.restore()
    assert machine.actuator.num_restored == 1
