"""One finished run, shared by the tests that look at what it left behind."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.live_run import LiveRun, Recording, record


class FinishedRun:
    """A run that ended, and what was seen of it meanwhile."""

    def __init__(self, live: LiveRun, recording: Recording) -> None:
        self.live = live
        self.recording = recording


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The tiny pipeline, run once."""
    with LiveRun(tmp_path_factory.mktemp("run")) as live:
        recording = asyncio.run(record(live))
        assert live.wait() == 0, live.story()
        return FinishedRun(live, recording)
