"""Divides CPU slots by priorities where no control group can be written: ratios come near at best.

One step of nice is a factor of about 1.25 of CPU time between tasks that want the same core
(`sched_prio_to_weight` in the kernel). The trap: where the kernel groups tasks by session
(`kernel.sched_autogroup_enabled`, on by default on most machines), nice counts only within a session,
and each tenant has one of its own; what counts between sessions is ``/proc/PID/autogroup``. Both are
set, and whichever the kernel reads has the same ratios.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from jigsawrl.devices import kernel

STEP = 1.25
MAX_NICE = 19

AUTOGROUP_TRIES = 5
AUTOGROUP_PAUSE_S = 0.11
"""The kernel lets users without privileges write one autogroup each 0.1 s."""


def _set_nice(thread: int, value: int) -> None:
    os.setpriority(os.PRIO_PROCESS, thread, value)


class NiceShares:
    """The tenant with the largest share keeps its priority, the others are lowered."""

    mechanism = "nice"

    def __init__(self, *, proc: Path, set_nice: Callable[[int, int], None] = _set_nice) -> None:
        self._proc = proc
        self._set_nice = set_nice
        self._former: dict[str, dict[str, tuple[int, int]]] = {}
        """Device -> tenant -> (process, its nice before)."""
        self.note: str | None = None
        """What went wrong in the last division; one line."""

    def divide(self, device: str, shares: Mapping[str, tuple[int, float]]) -> dict[str, float]:
        """What each tenant gets while all of them want to run, by the priorities that it has now."""
        self.note = None
        former = self._former.setdefault(device, {})
        for tenant in [t for t in former if former[t][0] != shares.get(t, (None, 0.0))[0]]:
            self._give(*former.pop(tenant))
        highest = max((share for _, share in shares.values()), default=0.0)
        weights: dict[str, float] = {}
        for tenant, (pid, share) in shares.items():
            try:
                before = os.getpriority(os.PRIO_PROCESS, pid)
                former.setdefault(tenant, (pid, before))
                self._give(pid, min(MAX_NICE, former[tenant][1] + steps(share, highest)))
                weights[tenant] = STEP ** -os.getpriority(os.PRIO_PROCESS, pid)
            except ProcessLookupError:
                continue
        asked = math.fsum(shares[tenant][1] for tenant in weights)
        total = math.fsum(weights.values())
        return {tenant: asked * weight / total for tenant, weight in weights.items()}

    def release(self, device: str) -> None:
        """Give the tenants of a device their priorities back."""
        for pid, nice in self._former.pop(device, {}).values():
            self._give(pid, nice)

    def restore(self) -> None:
        """Leave nothing behind."""
        for device in list(self._former):
            self.release(device)

    def _give(self, pid: int, nice: int) -> None:
        for member in kernel.family(pid, proc=self._proc):
            for thread in kernel.threads(member, proc=self._proc):
                try:
                    self._set_nice(thread, nice)
                except ProcessLookupError:
                    continue
                except PermissionError:
                    self.note = "this user may lower priorities, but not raise them again"
        # A group of several tenants (not started by a node) is not one tenant's to weigh.
        with suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                self._give_session(pid, nice)

    def _give_session(self, pid: int, nice: int) -> None:
        for _ in range(AUTOGROUP_TRIES):
            try:
                (self._proc / str(pid) / "autogroup").write_text(str(nice))
            except BlockingIOError:
                time.sleep(AUTOGROUP_PAUSE_S)
            except OSError:
                return  # this kernel has none, or the process is gone
            else:
                return


def steps(share: float, highest: float) -> int:
    """Steps of nice below the highest share."""
    if share == highest:
        return 0
    if share <= 0:
        return MAX_NICE
    return min(MAX_NICE, round(math.log(highest / share) / math.log(STEP)))
