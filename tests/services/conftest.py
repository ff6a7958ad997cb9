"""A leader of the scheduler service, for the length of a block."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from jigsawrl.bus.client import NatsBus
from services.scheduler.leader import DeposedError, Leader
from tests.services.scheduler_steps import Start


@pytest.fixture
def leading(bus: NatsBus, tmp_path: Path) -> Start:
    """Run a leader for the length of a block."""

    @asynccontextmanager
    async def start() -> AsyncIterator["asyncio.Future[None]"]:
        leader = Leader(bus, holder=uuid.uuid4().hex[:6], folder=tmp_path, snapshot_events=50)
        task = asyncio.ensure_future(leader.lead())
        try:
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, DeposedError):
                await task

    return start
