"""Fake trees of control groups and processes: folders that hold what the kernel would show."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from jigsawrl.devices.cpu import CpuActuator

NAMESPACE_FILE = ("self", "ns", "pid")


class FakeMachine:
    """A /sys/fs/cgroup and a /proc below a folder; processes exist where they are added."""

    def __init__(self, folder: Path) -> None:
        self.cgroups = folder / "cgroup"
        self.proc = folder / "proc"
        self.cgroups.mkdir(parents=True)
        namespace = self.proc.joinpath(*NAMESPACE_FILE)
        namespace.parent.mkdir(parents=True)
        namespace.touch()
        self.namespace = namespace.stat().st_ino
        self.own_groups("0::/")
        self.add_process(os.getpid(), start=100)

    def own_groups(self, *lines: str) -> None:
        """The group of the actuator's process, and of all others."""
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")

    def add_process(
        self, pid: int, *, start: int = 7, children: str = "", state: str = "S"
    ) -> None:
        """One thread, in the group of the actuator's process."""
        task = self.proc / str(pid) / "task" / str(pid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "children").write_text(children)
        fields = [state, *["0"] * 18, str(start)]
        (self.proc / str(pid) / "stat").write_text(f"{pid} (a (b) c) {' '.join(fields)} 0 0\n")
        groups = (self.proc / "self" / "cgroup").read_text()
        (self.proc / str(pid) / "cgroup").write_text(groups)

    def v2(self, mount: str = ".", controllers: str = "cpu memory", handed: str = "cpu") -> Path:
        """A mounted hierarchy."""
        folder = self.cgroups / mount
        folder.mkdir(exist_ok=True)
        self.group(folder, controllers=controllers, handed=handed)
        return folder

    def group(self, folder: Path, *, controllers: str, handed: str) -> Path:
        """One group of version 2."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.controllers").write_text(controllers + "\n")
        (folder / "cgroup.subtree_control").write_text(handed + "\n")
        return folder

    def v1(self, mount: str = "cpu") -> Path:
        """The cpu controller of version 1."""
        folder = self.cgroups / mount
        folder.mkdir()
        (folder / "cpu.shares").write_text("1024\n")
        return folder

    def actuator(self) -> CpuActuator:
        return CpuActuator(root=self.cgroups, proc=self.proc, remove=shutil.rmtree)


def slot_of(folder: Path) -> Path:
    """The one slot group in a folder."""
    (slot,) = folder.glob("jigsawrl-*")
    return slot


def tenants(slot: Path, weight_file: str) -> dict[str, tuple[str, list[int]]]:
    """Tenant -> (weight, processes that were moved there)."""
    return {
        group.name.removeprefix("tenant-"): (
            (group / weight_file).read_text(),
            [int(pid) for pid in (group / "cgroup.procs").read_text().split()],
        )
        for group in sorted(slot.iterdir())
        if group.is_dir()
    }
