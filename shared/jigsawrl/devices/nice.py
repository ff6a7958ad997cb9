"""Divides CPU slots by priorities where no control group can be written: ratios come near at best.

One step of nice is a factor of about 1.25 of CPU time between tasks that want the same core
(`sched_prio_to_weight` in the kernel). The trap: where the kernel groups tasks by session
(`kernel.sched_autogroup_enabled`, on by default on most machines), nice counts only within a session,
and each tenant has one of its own; what counts between sessions is ``/proc/PID/autogroup``. Both are
set; what is reported comes from the one that the kernel goes by here.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from jigsawrl.devices import kernel

STEP = 1.25
MAX_NICE = 19

AUTOGROUP_TRIES = 5
AUTOGROUP_PAUSE_S = 0.11
"""The kernel lets users without privileges write one autogroup each 0.1 s."""


def _set_nice(thread: int, value: int) -> None:
    os.setpriority(os.PRIO_PROCESS, thread, value)


class Priority(msgspec.Struct, frozen=True):
    """Of one process; `session` is None where it leads none, or the kernel knows no autogroups."""

    pid: int
    thread: int
    session: int | None

    def lowered(self, steps: int) -> Priority:
        """Further down."""
        session = None if self.session is None else min(MAX_NICE, self.session + steps)
        return Priority(self.pid, min(MAX_NICE, self.thread + steps), session)


class NiceShares:
    """The tenant with the largest share keeps its priority, the others are lowered."""

    mechanism = "nice"

    def __init__(
        self,
        *,
        proc: Path,
        autogroups: bool,
        set_nice: Callable[[int, int], None] = _set_nice,
    ) -> None:
        self._proc = proc
        self._autogroups = autogroups
        """Whether the kernel weighs the sessions of tenants here, not their threads."""
        self._set_nice = set_nice
        self._former: dict[str, dict[str, Priority]] = {}
        """Device -> tenant -> as it was before."""
        self.note: str | None = None
        """What went wrong in the last division; one line."""

    def divide(self, device: str, shares: Mapping[str, tuple[int, float]]) -> dict[str, float]:
        """What each tenant gets while all of them want to run, by the priorities that it has now."""
        self.note = None
        former = self._former.setdefault(device, {})
        for tenant in [t for t, p in former.items() if p.pid != shares.get(t, (0, 0.0))[0]]:
            self._give(former.pop(tenant))
        highest = max((share for _, share in shares.values()), default=0.0)
        weights: dict[str, float] = {}
        for tenant, (pid, share) in shares.items():
            try:
                before = former.setdefault(tenant, self._found(pid))
                wanted = before.lowered(steps(share, highest))
                self._give(wanted)
                effective = self._effective(self._found(pid))
            except ProcessLookupError:
                former.pop(tenant, None)
                continue
            if effective != self._effective(wanted):
                self.note = "this user may lower priorities, but not raise them again"
            weights[tenant] = STEP**-effective
        asked = math.fsum(shares[tenant][1] for tenant in weights)
        total = math.fsum(weights.values())
        return {tenant: asked * weight / total for tenant, weight in weights.items()}

    def release(self, device: str) -> None:
        """Give the tenants of a device their priorities back."""
        for priority in self._former.pop(device, {}).values():
            self._give(priority)

    def restore(self) -> None:
        """Leave nothing behind."""
        for device in list(self._former):
            self.release(device)

    def _found(self, pid: int) -> Priority:
        """What a process has now; raises ProcessLookupError where it is gone."""
        session = None
        if os.getsid(pid) == pid:  # a session of several tenants is not one tenant's to weigh
            with suppress(FileNotFoundError):  # holds "/autogroup-7 nice 0"
                session = int((self._proc / str(pid) / "autogroup").read_text().split()[-1])
        return Priority(pid, os.getpriority(os.PRIO_PROCESS, pid), session)

    def _effective(self, priority: Priority) -> int:
        """The one that the kernel goes by."""
        if self._autogroups and priority.session is not None:
            return priority.session
        return priority.thread

    def _give(self, priority: Priority) -> None:
        for member in kernel.family(priority.pid, proc=self._proc):
            for thread in kernel.threads(member, proc=self._proc):
                with suppress(ProcessLookupError, PermissionError):
                    self._set_nice(thread, priority.thread)
        if priority.session is not None:
            self._give_session(priority.pid, priority.session)

    def _give_session(self, pid: int, nice: int) -> None:
        for _ in range(AUTOGROUP_TRIES):
            try:
                (self._proc / str(pid) / "autogroup").write_text(str(nice))
            except BlockingIOError:
                time.sleep(AUTOGROUP_PAUSE_S)
            except OSError:
                return  # it is gone, or may not be raised
            else:
                return


def steps(share: float, highest: float) -> int:
    """Steps of nice below the highest share."""
    if share == highest:
        return 0
    if share <= 0:
        return MAX_NICE
    return min(MAX_NICE, round(math.log(highest / share) / math.log(STEP)))
