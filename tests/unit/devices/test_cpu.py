"""The actuator `cpu` on fake trees; on a real core in tests/integration/test_devices.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jigsawrl.devices import kernel
from jigsawrl.devices.cgroups import remove_leftovers
from jigsawrl.devices.cpu import CpuActuator
from jigsawrl.devices.nice import MAX_NICE, NiceShares, steps
from tests.unit.devices.trees import FakeMachine, slot_of, tenants

TWO = {"a.rollout0": (11, 0.75), "b.rollout0": (12, 0.25)}


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    made = FakeMachine(tmp_path)
    made.add_process(11, children="13")
    made.add_process(13)
    made.add_process(12)
    return made


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
        for _ in range(2)
    ]
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


# --- Control groups ------------------------------------------------------------------------------


def test_version_2_is_preferred_and_weights_are_linear(machine: FakeMachine) -> None:
    machine.v1()
    mount = machine.v2()
    applied = machine.actuator().apply("n/cpu0", TWO)
    assert applied.mechanism == "cgroup v2 cpu.weight"
    assert applied.fell_back is None
    assert applied.shares == {"a.rollout0": 0.75, "b.rollout0": 0.25}
    slot = slot_of(mount)
    assert slot.name == f"jigsawrl-{machine.namespace}-{os.getpid()}-100-n.cpu0"
    assert (slot / "cgroup.subtree_control").read_text() == "+cpu"
    assert tenants(slot, "cpu.weight") == {
        "a.rollout0": ("7500", [11, 13]),  # its child moves with it
        "b.rollout0": ("2500", [12]),
    }


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1_serves_as_well_where_version_2_has_no_cpu_controller(
    machine: FakeMachine, mount: str
) -> None:
    machine.v2("unified", controllers="hugetlb")
    machine.own_groups("3:cpuset:/other", "1:cpuacct,cpu:/job", "0::/")
    home = machine.v1(mount) / "job"
    home.mkdir()
    applied = machine.actuator().apply("n/cpu0", TWO)
    assert (applied.mechanism, applied.fell_back) == ("cgroup v1 cpu.shares", None)
    assert tenants(slot_of(home), "cpu.shares")["a.rollout0"] == ("7500", [11, 13])


def test_a_held_tenant_has_the_smallest_weight_and_shares_still_sum_to_one(
    machine: FakeMachine,
) -> None:
    mount = machine.v1()
    shares = {"a.rollout0": (11, 1.0), "b.rollout0": (12, 0.0)}
    applied = machine.actuator().apply("n/cpu0", shares)
    assert tenants(slot_of(mount), "cpu.shares")["b.rollout0"] == ("2", [12])
    assert sum(applied.shares.values()) == pytest.approx(1, abs=1e-12)
    assert 0 < applied.shares["b.rollout0"] < 0.001


def test_thirds_are_a_division(machine: FakeMachine) -> None:
    machine.v2()
    machine.add_process(14)
    shares = {f"{name}.rollout0": (pid, 1 / 3) for name, pid in (("a", 11), ("b", 12), ("c", 14))}
    applied = machine.actuator().apply("n/cpu0", shares)
    assert set(applied.shares.values()) == {0.3333}


def test_a_change_is_live_and_who_is_not_named_any_more_goes_back(machine: FakeMachine) -> None:
    mount = machine.v2()
    actuator = machine.actuator()
    actuator.apply("n/cpu0", TWO)
    actuator.apply("n/cpu1", {"c.rollout0": (13, 1.0)})
    actuator.apply("n/cpu0", {"b.rollout0": (12, 0.5)})
    (slot,) = mount.glob("jigsawrl-*-n.cpu0")
    assert tenants(slot, "cpu.weight") == {"b.rollout0": ("5000", [12, 12])}
    assert (mount / "cgroup.procs").read_text().split() == ["11", "13"]
    actuator.restore()
    assert not list(mount.glob("jigsawrl-*"))
    assert set((mount / "cgroup.procs").read_text().split()) == {"11", "12", "13"}


def test_the_cpu_controller_is_handed_down_to_the_nodes_group_and_taken_back(
    machine: FakeMachine,
) -> None:
    mount = machine.v2(handed="memory cpu")
    middle = machine.group(mount / "user", controllers="memory cpu", handed="memory")
    home = machine.group(middle / "session", controllers="memory", handed="")
    machine.own_groups("0::/user/session")
    actuator = machine.actuator()
    actuator.apply("n/cpu0", TWO)
    assert slot_of(home)
    controls = [g / "cgroup.subtree_control" for g in (mount, middle, home)]
    assert [control.read_text().strip() for control in controls] == ["memory cpu", "+cpu", "+cpu"]
    actuator.restore()
    assert [control.read_text().strip() for control in controls] == ["memory cpu", "-cpu", "-cpu"]


def test_groups_below_one_with_members_become_threaded(machine: FakeMachine) -> None:
    mount = machine.v2()
    actuator = machine.actuator()
    actuator.apply("n/cpu0", TWO)
    slot = slot_of(mount)
    for group in (slot, slot / "tenant-a.rollout0"):
        (group / "cgroup.type").write_text("domain invalid\n")
    shutil.rmtree(slot / "tenant-b.rollout0")
    actuator.apply("n/cpu0", TWO)
    assert (slot / "tenant-a.rollout0" / "cgroup.type").read_text() == "threaded"


def test_a_container_whose_group_lies_outside_what_is_mounted_uses_the_mount(
    machine: FakeMachine,
) -> None:
    machine.own_groups("1:cpu:/docker/0123/..", "0::/../../elsewhere")
    mount = machine.v1()
    machine.actuator().apply("n/cpu0", TWO)
    assert slot_of(mount)


def test_a_process_that_is_gone_is_left_out(machine: FakeMachine, tmp_path: Path) -> None:
    applied = CpuActuator(root=tmp_path / "none").apply("n/cpu0", {"a.rollout0": (2**22 + 1, 1.0)})
    assert applied.shares == {}


# --- Leftovers -----------------------------------------------------------------------------------


def test_groups_of_dead_nodes_are_removed_and_those_of_the_living_and_of_strangers_stay(
    machine: FakeMachine,
) -> None:
    mount = machine.v1()
    machine.add_process(50, start=5)
    machine.add_process(51, start=5, state="Z")
    here, elsewhere = machine.namespace, machine.namespace + 1
    names = {
        "lives": f"jigsawrl-{here}-50-5-n.cpu0",
        "pid used again": f"jigsawrl-{here}-50-4-n.cpu0",
        "gone": f"jigsawrl-{here}-52-5-n.cpu1",
        "zombie": f"jigsawrl-{here}-51-5-n.cpu0",
        "other container": f"jigsawrl-{elsewhere}-52-5-n.cpu0",
        "not ours": "jigsawrl-notes",
    }
    for name in names.values():
        (mount / "job" / name / "tenant-a.rollout0").mkdir(parents=True)
    (mount / "job" / names["gone"] / "tenant-a.rollout0" / "cgroup.procs").write_text("12\n")
    assert remove_leftovers(machine.cgroups, proc=machine.proc, remove=shutil.rmtree) == 3
    left = {group.name for group in (mount / "job").glob("jigsawrl-*")}
    assert left == {names[key] for key in ("lives", "other container", "not ours")}
    assert (mount / "job" / "cgroup.procs").read_text() == "12\n"


# --- Priorities ----------------------------------------------------------------------------------


def nice_of(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda machine: None, "no cgroup v2 at"),
        (lambda machine: machine.v2(controllers="memory"), "has no cpu controller"),
        (
            lambda machine: machine.v1().rename(machine.cgroups / "gone"),
            "no cgroup v1 cpu controller",
        ),
    ],
)
def test_without_a_usable_tree_priorities_come_near_and_the_reason_is_said(
    machine: FakeMachine, sleepers: list[int], prepare: object, reason: str
) -> None:
    prepare(machine)  # type: ignore[operator]
    base = nice_of(sleepers[0])
    actuator = CpuActuator(root=machine.cgroups)
    shares = {"a.rollout0": (sleepers[0], 0.75), "b.rollout0": (sleepers[1], 0.25)}
    applied = actuator.apply("n/cpu0", shares)
    assert applied.mechanism == "nice"
    assert applied.fell_back is not None
    assert reason in applied.fell_back
    assert "\n" not in applied.fell_back
    assert [nice_of(pid) - base for pid in sleepers] == [0, 5]
    assert applied.shares["a.rollout0"] == pytest.approx(0.75, abs=0.01)
    assert sum(applied.shares.values()) == pytest.approx(1)


def test_a_tree_that_can_be_read_only_is_fallen_back_from_at_the_first_division(
    machine: FakeMachine, sleepers: list[int]
) -> None:
    mount = machine.v1()
    name = f"jigsawrl-{machine.namespace}-{os.getpid()}-100-n.cpu0"
    (mount / name).write_text("a file where the group should be")
    applied = machine.actuator().apply("n/cpu0", {"a.rollout0": (sleepers[0], 1.0)})
    assert applied.mechanism == "nice"
    assert "cgroup v1 cpu.shares: " in (applied.fell_back or "")


def test_a_user_who_may_not_raise_priorities_is_told_and_the_truth_is_reported(
    sleepers: list[int],
) -> None:
    def refuse_to_raise(thread: int, value: int) -> None:
        if value < nice_of(thread):
            raise PermissionError
        os.setpriority(os.PRIO_PROCESS, thread, value)

    nice = NiceShares(proc=kernel.PROC, autogroups=False, set_nice=refuse_to_raise)
    a, b = sleepers
    nice.divide("n/cpu0", {"a.rollout0": (a, 0.75), "b.rollout0": (b, 0.25)})
    assert nice.note is None
    given = nice.divide("n/cpu0", {"a.rollout0": (a, 0.5), "b.rollout0": (b, 0.5)})
    assert "not raise them again" in (nice.note or "")
    assert given["b.rollout0"] == pytest.approx(0.25, abs=0.01)


def test_where_the_kernel_weighs_sessions_theirs_are_reported_and_given_back(
    machine: FakeMachine, sleepers: list[int]
) -> None:
    files = [machine.proc / str(pid) / "autogroup" for pid in sleepers]
    for pid, file in zip(sleepers, files, strict=True):
        machine.add_process(pid)
        file.write_text("/autogroup-7 nice 2\n")
    nice = NiceShares(proc=machine.proc, autogroups=True, set_nice=lambda thread, value: None)
    shares = {"a.rollout0": (sleepers[0], 0.75), "b.rollout0": (sleepers[1], 0.25)}
    given = nice.divide("n/cpu0", shares)
    assert given["b.rollout0"] == pytest.approx(0.25, abs=0.01)
    assert nice.note is None
    assert [file.read_text() for file in files] == ["2", "7"]
    nice.restore()
    assert [file.read_text() for file in files] == ["2", "2"]


def test_priorities_are_given_back(sleepers: list[int]) -> None:
    nice = NiceShares(proc=kernel.PROC, autogroups=False)
    before = [nice_of(pid) for pid in sleepers]
    a, b = sleepers
    nice.divide("n/cpu0", {"a.rollout0": (a, 1.0), "b.rollout0": (b, 0.0)})
    assert nice_of(b) == MAX_NICE
    nice.divide("n/cpu0", {"a.rollout0": (a, 1.0)})
    assert [nice_of(pid) for pid in sleepers] == before
    nice.divide("n/cpu0", {"a.rollout0": (a, 0.1), "b.rollout0": (b, 0.9)})
    nice.restore()
    assert [nice_of(pid) for pid in sleepers] == before


def test_a_step_of_nice_is_a_quarter() -> None:
    assert [steps(share, 0.8) for share in (0.8, 0.64, 0.4, 0.2, 0.001, 0.0)] == [
        0,
        1,
        3,
        6,
        19,
        19,
    ]
