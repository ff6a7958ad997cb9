"""Crashes, poison and bad luck: a run goes on, or says in one line why it can't."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import msgpack
import nats
import psutil
import pytest

from tests.integration.live_run import LiveRun, conserved

pytestmark = pytest.mark.slow


def assert_ended_well(live: LiveRun, num_steps: int) -> None:
    assert live.wait() == 0, live.story()
    tiny = live.tiny()
    assert tiny["version"] == num_steps
    assert conserved(tiny["groups"])
    assert conserved(tiny["sequences"])
    assert live.num_steps_done() == num_steps


async def test_poison_on_the_event_stream_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "trainer.num_steps=6") as live:
        live.until(lambda: live.num_steps_done() >= 1)
        client = await nats.connect(live.url())
        stream = client.jetstream()
        await stream.publish("jig.event.tiny.garbage", b"\xc1\x00no messagepack")
        unknown = msgpack.packb({"type": "moon_landed", "id": "moon_landed:1", "schema": 1})
        await stream.publish("jig.event.tiny.moon_landed", unknown)
        await client.close()
        assert_ended_well(live, 6)
        assert live.summary()["dead_letters"] == 2
        assert "dead letters: 2" in live.stdout


def assert_nothing_is_left(live: LiveRun, number: signal.Signals) -> None:
    """The command gets this signal, and ends with all that it started."""
    children = live.process.children(recursive=True)
    assert len(children) >= 8
    live.process.send_signal(number)
    live.process.wait(10)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def assert_stops(live: LiveRun, number: signal.Signals) -> None:
    """A signal that asks stops everything within five seconds."""
    start_s = time.monotonic()
    assert_nothing_is_left(live, number)
    assert time.monotonic() - start_s < 6  # 5 s and the test's own polling
    assert live.wait() == 128 + number
    assert f"stopped by {number.name}" in live.stderr


def test_a_run_that_is_asked_to_stop_stops_everything(tmp_path: Path) -> None:
    """By SIGTERM; `test_resume` asks by SIGINT, and kills."""
    with LiveRun(tmp_path, "trainer.num_steps=1000") as live:
        live.until(lambda: live.num_steps_done() >= 1)
        assert_stops(live, signal.SIGTERM)


def test_a_pipeline_that_can_not_work_ends_with_status_1_and_the_reason(tmp_path: Path) -> None:
    overrides = ("model.warmup.max_steps=1", "model.warmup.target_accuracy=1.0")
    with LiveRun(tmp_path, *overrides) as live:
        assert live.wait() == 1, live.story()
        assert len(live.stderr.strip().splitlines()) == 1
        assert live.stderr.startswith("jigsaw run: ")
        assert live.tiny()["state"] == "failed"
