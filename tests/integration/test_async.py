"""Mode async on real processes, checked from what lies on disk and what crossed the bus."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from jigsawrl.contract.codec import EVENTS
from jigsawrl.contract.events import SequencesFinished
from tests.integration.live_run import LiveRun, conserved, subscribe

pytestmark = pytest.mark.slow

NUM_STEPS = 16

LONG_TAIL = (
    "task.min_digits=2",
    "task.max_digits=20",
    "model.warmup.target_accuracy=0.05",
    "rollout.sampling.max_new_tokens=40",
    "rollout.engine.max_running=4",
    "evaluation.every=16",
    f"trainer.num_steps={NUM_STEPS}",
)
"""Few sequences at once and long ones: weights land while some are half done."""


def trained(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Per version that was trained *from*, the samples of its batch."""
    return {
        version: [
            json.loads(row) for row in (folder / f"v{version + 1}.jsonl").read_text().splitlines()
        ]
        for version in range(NUM_STEPS)
    }


@pytest.mark.parametrize("max_staleness", [1, 4])
async def test_no_trained_sample_is_older_than_the_bound_and_none_is_thrown_away(
    tmp_path: Path, max_staleness: int
) -> None:
    mode = ("mode.type=async", f"mode.max_staleness={max_staleness}")
    correction = ("algorithm.correction.type=truncate",)
    generated: Counter[int] = Counter()

    async def on_event(message: Msg) -> None:
        event = EVENTS.decode(message.data)
        assert isinstance(event, SequencesFinished)
        generated.update(finish.num_tokens for finish in event.finished)

    with LiveRun(tmp_path, *LONG_TAIL, *mode, *correction) as live:
        url = await asyncio.to_thread(live.url)
        client = await subscribe(url, "jig.event.tiny.sequences_finished", on_event)
        assert await asyncio.to_thread(live.wait) == 0, live.story()
        await client.close()
        groups = live.tiny()["groups"]
        samples = trained(live.folder / "trajectories")
    assert conserved(groups)
    assert groups["trained"] == groups["admitted"], "admission alone keeps the bound"
    ages, num_mixed, lengths = Counter[int](), 0, Counter[int]()
    for version, batch in samples.items():
        for sample in batch:
            versions = [v for v in sample["versions"] if v >= 0]
            assert versions == sorted(versions), "later tokens are of later versions"
            assert versions[-1] <= version
            ages[version - versions[0]] += 1
            num_mixed += versions[0] != versions[-1]
            lengths[len(versions)] += 1
    assert max(ages) <= max_staleness
    assert sum(ages[age] for age in ages if age > 0) > 0, "generation ran ahead of training"
    assert num_mixed > 0, "weights landed in mid-sequence"
    assert lengths == generated, "what is trained is distributed as what is generated"


def test_async_without_a_correction_is_refused(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "mode.type=async") as live:
        assert live.wait() == 2
        assert "algorithm.correction" in live.stderr
        assert len(live.stderr.strip().splitlines()) == 1
