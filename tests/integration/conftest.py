"""Finished runs, shared by the tests that look at what they left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.daemon_site import Daemon
from tests.integration.live_run import LiveRun, Recording, record
from tests.integration.test_exactness import fingerprint, learned, start


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


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the exact pipeline computes in mode sync, with one worker and nothing killed."""
    with start(tmp_path_factory.mktemp("undisturbed")) as live:
        return learned(fingerprint(live))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """None is up yet; all is ended afterwards."""
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.end()
