"""A run that was stopped, and one that was killed, goes on from what its folder holds."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_run import LiveRun
from tests.integration.test_exactness import NUM_STEPS, fingerprint, start
from tests.integration.test_faults import assert_ended_well, assert_nothing_is_left, assert_stops

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_that_is_stopped_then_killed_goes_on_changes_no_bit_and_ends_once(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Nor does it that this one is evaluated, and the undisturbed one is not."""
    with start(tmp_path, "evaluation.enabled=true", "evaluation.every=1") as live:
        live.until(lambda: live.num_steps_done() >= 4)
        assert_stops(live, signal.SIGINT)
        assert f"go on with: jigsaw run --resume {live.run_folder}" in live.stderr
    with LiveRun(tmp_path, resume=True) as live:
        live.until(lambda: live.num_steps_done() >= 12)
        assert_nothing_is_left(live, signal.SIGKILL)
    with LiveRun(tmp_path, resume=True) as live:
        assert_ended_well(live, NUM_STEPS)
        assert fingerprint(live) == undisturbed
        ended = live.tiny()
        assert ended["eval_before"] is not None
    with LiveRun(tmp_path, resume=True) as live:
        assert live.wait() == 0, live.story()
        assert live.tiny() == ended, "a finished run is not run again"
