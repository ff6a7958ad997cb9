"""A run that was stopped or killed goes on from what its folder holds."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.integration.live_run import LiveRun, conserved

pytestmark = pytest.mark.slow

NUM_STEPS = 12


def assert_whole(live: LiveRun) -> None:
    """It ended well, and its metrics tell of each step once, in order."""
    assert live.wait() == 0, live.story()
    tiny = live.tiny()
    assert tiny["version"] == NUM_STEPS
    assert conserved(tiny["groups"])
    assert conserved(tiny["sequences"])
    assert tiny["eval_before"] is not None
    lines = (live.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_goes_on_after_its_command_was_stopped_or_killed(
    tmp_path: Path, number: signal.Signals
) -> None:
    with LiveRun(tmp_path, f"trainer.num_steps={NUM_STEPS}") as live:
        live.until(lambda: live.num_steps_done() >= 4)
        live.process.send_signal(number)
        live.process.wait(10)
        if number == signal.SIGINT:
            assert f"go on with: jigsaw run --resume {live.run_folder}" in live.stderr
    with LiveRun(tmp_path, resume=True) as live:
        live.until(lambda: live.num_steps_done() >= 8)
        live.process.send_signal(number)
        live.process.wait(10)
    with LiveRun(tmp_path, resume=True) as live:
        assert_whole(live)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    with LiveRun(tmp_path) as live:
        assert live.wait() == 0, live.story()
        before = live.tiny()
    with LiveRun(tmp_path, resume=True) as live:
        assert live.wait() == 0, live.story()
        assert live.tiny() == before
