"""The scheduler decides, and nobody else: seen from outside, on the bus."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jigsawrl.contract.codec import COMMANDS
from tests.integration.conftest import FinishedRun
from tests.integration.live_run import LiveRun, Recording, run_program, subscribe

pytestmark = pytest.mark.slow

NUM_STEPS = 12
DECISIONS = ("make_groups", "place_sequences", "batch_cut")


def as_json(payload: bytes) -> dict[str, Any]:
    """A command as the replay prints it."""
    data: dict[str, Any] = json.loads(msgspec.json.encode(COMMANDS.decode(payload)))
    return data


def test_a_replay_of_the_recorded_events_gives_the_commands_of_the_live_run(
    finished: FinishedRun,
) -> None:
    folder = finished.live.run_folder / "scheduler"
    done = run_program("services.scheduler.replay", str(folder))
    assert done.returncode == 0, done.stderr
    replayed = {c["id"]: c for c in map(json.loads, done.stdout.splitlines())}
    live = {c["id"]: c for c in map(as_json, finished.recording.commands)}
    assert {c["type"] for c in live.values()} >= set(DECISIONS)
    assert [name for name, command in live.items() if replayed.get(name) != command] == []
    decided = {name for name, command in replayed.items() if command["type"] in DECISIONS}
    assert decided <= set(live)


async def test_nothing_is_decided_while_the_scheduler_is_stopped(tmp_path: Path) -> None:
    with LiveRun(tmp_path, f"trainer.num_steps={NUM_STEPS}") as live:
        await asyncio.to_thread(live.until, lambda: live.num_steps_done() >= 2)
        scheduler = live.service("scheduler")
        scheduler.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)  # what it had sent is on its way
        recording = Recording()
        client = await subscribe(live.url(), "jig.command.>", recording.on_command)
        num_steps_done = live.num_steps_done()
        await asyncio.sleep(4)
        assert recording.commands == []
        assert live.num_steps_done() <= num_steps_done + 1  # the step that had been cut
        scheduler.send_signal(signal.SIGCONT)
        await client.close()
        assert await asyncio.to_thread(live.wait) == 0, live.story()
        assert live.tiny()["version"] == NUM_STEPS
