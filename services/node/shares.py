"""How this node's devices are divided: what was asked, who runs, what the actuators did.

The node says what is asked and when a process starts or ends; each time the device of that tenant is
divided again, so that a restarted tenant's new process has its share before it has done anything. It
knows no bus: what was applied waits in `reports` for whoever tells it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import structlog

from jigsawrl.contract.parts import AppliedShare
from jigsawrl.devices.base import Actuator, Applied, check_shares

log = structlog.get_logger()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One division, to be told as `SharesApplied`."""

    cause: str
    device: str
    shares: tuple[AppliedShare, ...]
    mechanism: str
    fell_back: str | None


class Shares:
    """The divisions of one node's devices."""

    def __init__(
        self, actuators: Mapping[str, Actuator], *, pid_of: Callable[[str], int | None]
    ) -> None:
        self._actuators = actuators
        """By device id; devices of one kind have the same."""
        self._pid_of = pid_of
        self._asked: dict[str, dict[str, float]] = {device: {} for device in actuators}
        self._left: set[str] = set()
        """Devices with traces of a tenant that was removed."""
        self._reasons: dict[str, str | None] = {}
        """Why each device's actuator fell back, as last logged."""
        # One thread, so that calls of actuators never overlap, even where a waiter is cancelled.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shares")
        self.reports: asyncio.Queue[Report] = asyncio.Queue()

    def add(self, tenant: str, *, device: str, share: float) -> None:
        """A tenant is about to start; its share holds once its process runs."""
        self._asked[device][tenant] = share

    def remove(self, tenant: str) -> None:
        """A tenant shall end: what it had may be asked for others from now on."""
        for device, shares in self._asked.items():
            if shares.pop(tenant, None) is not None:
                self._left.add(device)

    async def divide(self, device: str, shares: Mapping[str, float], *, cause: str) -> None:
        """What the scheduler asks for a whole device."""
        try:
            if device not in self._asked:
                raise ValueError(f"no device {device} here, only {', '.join(sorted(self._asked))}")
            check_shares(device, shares)
        except ValueError as error:
            log.error("refused shares", device=device, reason=str(error))
            refused = Report(
                cause=cause, device=device, shares=(), mechanism="none", fell_back=str(error)
            )
            self.reports.put_nowait(refused)
            return
        self._asked[device] = dict(shares)
        await self._apply(device, cause=cause)

    async def started(self, tenant: str) -> None:
        """A process of a tenant runs, its first one or the next."""
        for device, shares in self._asked.items():
            if tenant in shares:
                await self._apply(device)

    async def let_go(self) -> None:
        """The process of a tenant that was removed is gone: clean up behind it."""
        while self._left:
            await self._apply(self._left.pop())

    async def restore(self) -> None:
        """Put everything back."""
        loop = asyncio.get_running_loop()
        for actuator in {id(a): a for a in self._actuators.values()}.values():
            await loop.run_in_executor(self._executor, actuator.restore)
        self._executor.shutdown(wait=False)

    async def _apply(self, device: str, *, cause: str = "") -> None:
        asked = dict(self._asked[device])
        running = {
            tenant: (pid, share)
            for tenant, share in asked.items()
            if (pid := self._pid_of(tenant)) is not None
        }
        apply = partial(self._actuators[device].apply, device, running)
        try:
            applied = await asyncio.get_running_loop().run_in_executor(self._executor, apply)
        except (OSError, ValueError) as error:
            applied = Applied(shares={}, mechanism="none", fell_back=str(error))
        if applied.fell_back is not None and self._reasons.get(device) != applied.fell_back:
            log.warning("fell back", device=device, reason=applied.fell_back)
        self._reasons[device] = applied.fell_back
        if applied.shares or cause:
            self.reports.put_nowait(
                Report(
                    cause=cause,
                    device=device,
                    shares=tuple(
                        AppliedShare(tenant=tenant, asked=asked[tenant], applied=share)
                        for tenant, share in applied.shares.items()
                    ),
                    mechanism=applied.mechanism,
                    fell_back=applied.fell_back,
                )
            )
