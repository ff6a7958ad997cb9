"""Control experiments: without a learning signal nothing is learned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import LiveRun

pytestmark = pytest.mark.slow


def test_a_learning_rate_of_zero_changes_no_answer(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "trainer.optimizer.learning_rate=0") as live:
        assert live.wait() == 0, live.story()
        tiny = live.tiny()
        assert tiny["eval_before"] == tiny["eval_after"]
