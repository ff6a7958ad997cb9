"""Rollout and evaluation get weights from the channel alone: neither needs the run's folder."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from jigsawrl.contract.codec import EVENTS
from jigsawrl.contract.events import SequencesFinished
from tests.integration.live_run import LiveRun, subscribe

pytestmark = pytest.mark.slow


def can_unshare() -> bool:
    """Whether this machine lets us have a mount namespace of our own."""
    try:
        return subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0
    except OSError:
        return False


def test_only_the_trainer_is_told_where_the_run_folder_is(tmp_path: Path) -> None:
    with LiveRun(tmp_path) as live:
        for role in ("environment", "reward", "rollout", "evaluation"):
            assert str(live.run_folder) not in live.service(role).cmdline()
        assert str(live.run_folder) in live.service("trainer").cmdline()


@pytest.mark.skipif(not can_unshare(), reason="needs a mount namespace (root)")
async def test_a_rollout_worker_works_where_the_run_folder_is_hidden(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "trainer.num_steps=40") as live:
        await asyncio.to_thread(live.until, lambda: live.num_steps_done() >= 1)
        finished = asyncio.Event()

        async def on_event(message: Msg) -> None:
            event = EVENTS.decode(message.data)
            assert isinstance(event, SequencesFinished)
            if event.worker.id == "tiny.rollout9" and event.finished:
                finished.set()

        client = await subscribe(live.url(), "jig.event.tiny.sequences_finished", on_event)
        rollout = [sys.executable, "-m", "services.rollout", "--url", live.url()]
        rollout += ["--pipeline", "tiny", "--worker", "tiny.rollout9"]
        hide = f"mount -t tmpfs -o mode=000 none {shlex.quote(str(live.run_folder))}"
        with (tmp_path / "hidden.log").open("wb") as log:
            worker = await asyncio.create_subprocess_exec(
                *("unshare", "-m", "sh", "-c", f"{hide} && exec {shlex.join(rollout)}"),
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        try:
            await asyncio.wait_for(finished.wait(), 60)
        except TimeoutError:
            log_text = (tmp_path / "hidden.log").read_text()
            raise AssertionError(f"no sequence\n{log_text}\n{live.story()}") from None
        finally:
            await client.close()
            worker.send_signal(signal.SIGTERM)
            await asyncio.wait_for(worker.wait(), 10)
        assert await asyncio.to_thread(live.wait) == 0, live.story()
