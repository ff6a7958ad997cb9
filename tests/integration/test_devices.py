"""Real processes on one real core: what they get for the shares that are asked."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jigsawrl.devices import kernel
from jigsawrl.devices.cgroups import ROOT, find_v1, find_v2, remove_leftovers
from jigsawrl.devices.cpu import CpuActuator
from jigsawrl.processes import die_with_parent

CORE = max(os.sched_getaffinity(0))
CPU_S = 2.0
"""Of both processes together in one measurement: on a busy machine the wall says little."""
TOLERANCE = 0.15

SPIN = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    # A view of native integers stores all bytes at once; `struct.pack_into` clears them first.
    numbers = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
    count = 0
    while True:
        count += 1
        numbers[0] = count
"""

FORK = """
import os, sys, time
pid = os.fork()
if pid:
    print(pid, flush=True)
time.sleep(60)
"""


def why_not() -> str | None:
    """Why no control group can be written here."""
    actuator = CpuActuator()
    try:
        return actuator.apply("n/cpu0", {}).fell_back
    finally:
        actuator.restore()


NEEDS_CGROUP = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Spinner:
    """A process that counts as fast as it is let, pinned as the node pins a tenant."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        self._file = path.open("rb")
        self._page = mmap.mmap(self._file.fileno(), 8, access=mmap.ACCESS_READ)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SPIN, str(path)],
            start_new_session=True,
            preexec_fn=die_with_parent((CORE,)),
        )

    @property
    def count(self) -> int:
        return int.from_bytes(self._page[:8], sys.byteorder)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._page.close()
        self._file.close()


@pytest.fixture
def spinners(tmp_path: Path) -> Iterator[list[Spinner]]:
    made = [Spinner(tmp_path / name) for name in ("a", "b")]
    while not all(spinner.count for spinner in made):
        time.sleep(0.01)
    yield made
    for spinner in made:
        spinner.close()


def cpu_s(spinners: list[Spinner]) -> float:
    return sum(psutil.Process(s.process.pid).cpu_times().user for s in spinners)


def progress(spinners: list[Spinner]) -> float:
    """Of the first over that of the second, from now on."""
    before, begun_s = [spinner.count for spinner in spinners], cpu_s(spinners)
    while cpu_s(spinners) - begun_s < CPU_S:
        time.sleep(0.05)
    first, second = (s.count - b for s, b in zip(spinners, before, strict=True))
    return first / second


def groups() -> dict[int | str, tuple[str, str]]:
    """The control groups of this process and its children."""
    pids: list[int | str] = [os.getpid(), *kernel.children(os.getpid(), proc=kernel.PROC)]
    return {
        pid: (
            kernel.group_path(pid, controller=None, proc=kernel.PROC),
            kernel.group_path(pid, controller="cpu", proc=kernel.PROC),
        )
        for pid in pids
    }


def ours() -> list[Path]:
    return list(ROOT.rglob(f"jigsawrl-*-{os.getpid()}-*"))


def check_division(actuator: CpuActuator, spinners: list[Spinner]) -> None:
    a, b = (spinner.process.pid for spinner in spinners)
    before = groups()
    nices = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (a, b)]
    try:
        applied = actuator.apply("n/cpu0", {"p.rollout0": (a, 0.75), "q.rollout0": (b, 0.25)})
        assert applied.shares["p.rollout0"] == pytest.approx(0.75, abs=0.01)
        unequal = progress(spinners)
        actuator.apply("n/cpu0", {"p.rollout0": (a, 0.5), "q.rollout0": (b, 0.5)})
        equal = progress(spinners)
        print(f"{applied.mechanism}: asked 3:1, got {unequal:.3f}:1; asked 1:1, got {equal:.3f}:1")
    finally:
        actuator.restore()
    assert unequal == pytest.approx(3, rel=TOLERANCE)
    assert equal == pytest.approx(1, rel=TOLERANCE)
    assert groups() == before
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in (a, b)] == nices
    assert not ours()


@NEEDS_CGROUP
def test_shares_of_3_to_1_make_progress_of_3_to_1_and_change_live(spinners: list[Spinner]) -> None:
    check_division(CpuActuator(), spinners)


def test_without_control_groups_priorities_come_near(
    spinners: list[Spinner], tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("this user may not raise priorities again")
    check_division(CpuActuator(root=tmp_path), spinners)


@NEEDS_CGROUP
def test_children_move_too_and_a_dead_nodes_groups_are_removed_by_the_next() -> None:
    found = next(h for h in (find_v2(ROOT), find_v1(ROOT)) if not isinstance(h, str))
    parent = subprocess.Popen(
        [sys.executable, "-c", FORK], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    former = found.group_of(parent.pid, proc=kernel.PROC)
    code = (
        "import sys\n"
        "from jigsawrl.devices.cpu import CpuActuator\n"
        "applied = CpuActuator().apply('n/cpu0', {'p.rollout0': (int(sys.argv[1]), 1.0)})\n"
        "print(applied.shares)\n"
    )
    node = subprocess.Popen(  # ends without a restore, as if it were killed
        [sys.executable, "-c", code, str(parent.pid)], stdout=subprocess.DEVNULL
    )
    try:
        assert node.wait() == 0
        inside = {found.group_of(pid, proc=kernel.PROC) for pid in (parent.pid, child)}
        (group,) = inside
        assert group.name == "tenant-p.rollout0"
        assert f"-{node.pid}-" in group.parent.name
        assert remove_leftovers() >= 1
        assert not group.parent.exists()
        assert {found.group_of(pid, proc=kernel.PROC) for pid in (parent.pid, child)} == {former}
    finally:
        os.killpg(parent.pid, 9)
        parent.communicate()


@NEEDS_CGROUP
def test_the_groups_of_a_node_that_lives_are_left_alone(spinners: list[Spinner]) -> None:
    actuator = CpuActuator()
    pid = spinners[0].process.pid
    try:
        actuator.apply("n/cpu0", {"p.rollout0": (pid, 1.0)})
        before = groups()
        code = "from jigsawrl.devices.cgroups import remove_leftovers; remove_leftovers()"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert groups() == before
        assert ours()
        # A tenant that dies leaves a group that is in nobody's way.
        spinners[0].process.kill()
        spinners[0].process.wait()
        assert actuator.apply("n/cpu0", {"p.rollout0": (pid, 1.0)}).shares == {}
    finally:
        actuator.restore()
    assert not ours()
