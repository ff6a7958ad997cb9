"""Divides CPU slots by the weights of Linux control groups, v2 (`cpu.weight`) or v1 (`cpu.shares`).

Below the node's own group lies one group per slot, ``jigsawrl-<pid namespace>-<pid>-<start>-<device>``,
and in it one per tenant. Three things that were not obvious:

- Slot groups have no common parent of ours: the kernel gives a group one weight, divided among the
  cores on which its members run, so tenants on many slots would each have a fraction of it.
- A group of v2 that has members of its own can only hand the cpu controller to *threaded* children.
  Those stay in the resource domain of the node's group, limits of memory included, as they should.
- The name says whose groups these are, so that any later node on this machine can remove them: a file
  about them would have to lie where that node looks for it.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from jigsawrl.devices import kernel

ROOT = Path("/sys/fs/cgroup")

SCALE = 10_000
"""Weight of a share of 1: the largest that v2 takes. Any scale would do, only ratios count."""

REMOVE_TRIES = 50
REMOVE_PAUSE_S = 0.02
"""A process that was killed leaves its group only when it is gone: a second is ample."""

_NAME = re.compile(r"jigsawrl-(\d+)-(\d+)-(\d+)-.+")

Remove = Callable[[Path], None]
"""Removes a group: `Path.rmdir`, except on a fake tree, whose folders hold real files."""


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cpu controller lives on this machine."""

    mechanism: str
    mount: Path
    controller: str | None
    """As in /proc/PID/cgroup; None for v2."""
    weight_file: str
    min_weight: int

    @property
    def v2(self) -> bool:
        """Controllers must be handed down to child groups."""
        return self.controller is None

    def group_of(self, pid: int | str, *, proc: Path) -> Path:
        """Its group; in a container whose paths lie outside what is mounted, the mount itself."""
        path = kernel.group_path(pid, controller=self.controller, proc=proc)
        group = self.mount / path.lstrip("/")
        return group if ".." not in group.parts and group.is_dir() else self.mount

    def weighs(self, group: Path) -> bool:
        """Whether a process there is weighed by a group other than the root."""
        while group != self.mount:
            if (group / self.weight_file).exists():
                return True
            group = group.parent
        return False


def find_v2(root: Path) -> Hierarchy | str:
    """Version 2 with the cpu controller, or why not."""
    for mount in (root, root / "unified"):
        controllers = mount / "cgroup.controllers"
        if controllers.exists():
            if "cpu" not in controllers.read_text().split():
                return f"cgroup v2 at {mount} has no cpu controller"
            return Hierarchy(
                mechanism="cgroup v2 cpu.weight",
                mount=mount,
                controller=None,
                weight_file="cpu.weight",
                min_weight=1,
            )
    return f"no cgroup v2 at {root}"


def find_v1(root: Path) -> Hierarchy | str:
    """Version 1's cpu controller, or why not."""
    for mount in (root / "cpu", root / "cpu,cpuacct"):
        if (mount / "cpu.shares").exists():
            return Hierarchy(
                mechanism="cgroup v1 cpu.shares",
                mount=mount,
                controller="cpu",
                weight_file="cpu.shares",
                min_weight=2,
            )
    return f"no cgroup v1 cpu controller at {root}"


class CgroupShares:
    """One node's groups in one hierarchy."""

    def __init__(self, hierarchy: Hierarchy, *, proc: Path, remove: Remove) -> None:
        self._hierarchy = hierarchy
        self._proc = proc
        self._remove = remove
        self._home = hierarchy.group_of("self", proc=proc)
        pid = os.getpid()
        start = kernel.start_ticks(pid, proc=proc)
        self._name = f"jigsawrl-{kernel.pid_namespace(proc=proc)}-{pid}-{start}"
        self._groups: dict[str, Path] = {}
        self._former: dict[Path, Path] = {}
        """Where the processes of each of our groups came from."""
        self._handed_down: list[Path] = []
        """Groups that got the cpu controller for their children from us, outermost first."""

    @property
    def mechanism(self) -> str:
        """For people."""
        return self._hierarchy.mechanism

    def divide(self, device: str, shares: Mapping[str, tuple[int, float]]) -> dict[str, float]:
        """What each tenant gets while all of them want to run. Raises OSError where it can't."""
        slot = self._groups.setdefault(device, self._home / f"{self._name}-{_word(device)}")
        if not slot.is_dir():
            self._hand_down_to(self._home)
            self._make(slot)
            if self._hierarchy.v2:
                (slot / "cgroup.subtree_control").write_text("+cpu")
        for group in _groups_in(slot):
            if group.name.removeprefix("tenant-") not in shares:
                self._dissolve(group)
        weights: dict[str, int] = {}
        for tenant, (pid, share) in shares.items():
            # No group of ours may be called like a file of the kernel's.
            group = slot / f"tenant-{tenant}"
            weight = max(self._hierarchy.min_weight, int(share * SCALE + 1e-6))
            self._make(group)
            (group / self._hierarchy.weight_file).write_text(str(weight))
            if self._enter(group, pid):
                weights[tenant] = weight
        total = max(SCALE, sum(weights.values()))
        return {tenant: weight / total for tenant, weight in weights.items()}

    def release(self, device: str) -> None:
        """Put the processes of a device back and remove its groups."""
        slot = self._groups.pop(device, None)
        if slot is not None and slot.is_dir():
            for group in _groups_in(slot):
                self._dissolve(group)
            self._dissolve(slot)

    def restore(self) -> None:
        """Leave nothing behind."""
        for device in list(self._groups):
            self.release(device)
        for group in reversed(self._handed_down):
            _write_if_possible(group / "cgroup.subtree_control", "-cpu")
        self._handed_down.clear()

    def _hand_down_to(self, group: Path) -> None:
        """Have the cpu controller in the children of `group`, from the nearest ancestor that has it."""
        if not self._hierarchy.v2:
            return
        without = [group]
        while "cpu" not in (without[-1] / "cgroup.controllers").read_text().split():
            if without[-1] == self._hierarchy.mount:
                raise OSError(errno.ENODEV, "the cpu controller is gone", str(group))
            without.append(without[-1].parent)
        for ancestor in reversed(without):
            control = ancestor / "cgroup.subtree_control"
            if "cpu" not in control.read_text().split():
                control.write_text("+cpu")
                self._handed_down.append(ancestor)

    def _make(self, group: Path) -> None:
        group.mkdir(exist_ok=True)
        kind = group / "cgroup.type"
        if self._hierarchy.v2 and kind.exists() and "invalid" in kind.read_text():
            kind.write_text("threaded")

    def _enter(self, group: Path, pid: int) -> bool:
        """Move a process and its descendants; False where it is gone. The parent goes first: what it
        forks from then on is born in the group."""
        former = self._hierarchy.group_of(pid, proc=self._proc)
        if former != group:
            self._former[group] = former
        try:
            _add(group, pid)
        except ProcessLookupError:
            return False
        for member in kernel.family(pid, proc=self._proc)[1:]:
            try:
                _add(group, member)
            except ProcessLookupError:
                continue
        return True

    def _dissolve(self, group: Path) -> None:
        dissolve(group, self._former.pop(group, self._home), remove=self._remove)


def dissolve(group: Path, target: Path, *, remove: Remove) -> bool:
    """Move all members of a group to another and remove it; False where it can't be emptied."""
    for _ in range(REMOVE_TRIES):
        for member in _members(group):
            try:
                _add(target, member)
            except OSError:
                continue  # gone, or it may not live there: then the group stays
        try:
            remove(group)
        except FileNotFoundError:
            return True
        except OSError:
            time.sleep(REMOVE_PAUSE_S)
        else:
            return True
    return False


def remove_leftovers(
    root: Path = ROOT, *, proc: Path = kernel.PROC, remove: Remove = Path.rmdir
) -> int:
    """Remove the `leftovers`; how many slots that were."""
    num_removed = 0
    for slot in leftovers(root, proc=proc):
        for group in _groups_in(slot):
            dissolve(group, slot.parent, remove=remove)
        num_removed += dissolve(slot, slot.parent, remove=remove)
    return num_removed


def leftovers(root: Path = ROOT, *, proc: Path = kernel.PROC) -> list[Path]:
    """The slots' groups of nodes of this machine that are no more. Those of another pid namespace
    (another container) are none: whether their node lives can't be known here."""
    found = []
    for hierarchy in (find_v2(root), find_v1(root)):
        if isinstance(hierarchy, str):
            continue
        for folder, names, _ in os.walk(hierarchy.mount):
            ours = [name for name in names if _NAME.fullmatch(name)]
            names[:] = [name for name in names if name not in ours]
            slots = (Path(folder) / name for name in ours)
            found += [slot for slot in slots if _orphaned(slot, proc=proc)]
    return found


def _orphaned(slot: Path, *, proc: Path) -> bool:
    match = _NAME.fullmatch(slot.name)
    assert match is not None
    namespace, pid, start = (int(part) for part in match.groups())
    return (
        namespace == kernel.pid_namespace(proc=proc) and kernel.start_ticks(pid, proc=proc) != start
    )


def _groups_in(group: Path) -> list[Path]:
    return sorted(entry for entry in group.iterdir() if entry.is_dir())


def _members(group: Path) -> list[int]:
    try:
        text = (group / "cgroup.procs").read_text()
    except FileNotFoundError:
        return []
    except OSError:  # a threaded group does not tell processes; a thread stands for its process
        text = (group / "cgroup.threads").read_text()
    return [int(pid) for pid in text.split()]


def _add(group: Path, pid: int) -> None:
    with (group / "cgroup.procs").open("a") as members:
        members.write(f"{pid}\n")


def _write_if_possible(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError:
        return  # others have come to use it


def _word(device: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", ".", device)
