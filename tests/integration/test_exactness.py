"""With the deterministic engine a run gives the same bits however sequences are batched and placed. The
same of stops, kills and moves is in `test_resume`, `test_kills` and `test_migration`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.live_run import PIPELINE, LiveRun

pytestmark = pytest.mark.slow

NUM_STEPS = 24
"""So many that each process of a run can be killed in a step of its own (`test_kills`)."""
EXACT = (
    "rollout.engine.deterministic=true",
    "evaluation.enabled=false",
    "trainer.checkpoint.every=2",
    "trainer.optimizer.learning_rate=1e-4",
    "model.warmup.target_accuracy=0.5",
    f"trainer.num_steps={NUM_STEPS}",
)


def start(folder: Path, *changes: str) -> LiveRun:
    """The tiny pipeline, exact and without evaluations."""
    pipeline = PIPELINE.partition("[evaluation]")[0]
    return LiveRun(folder, *EXACT, *changes, pipeline=pipeline)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def fingerprint(live: LiveRun, *, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """All that a run computed: tokens, log-probs, versions and rewards in the order of training,
    losses, and the last weights. Ids of groups are left out: a rollback gives prompts new ones."""
    assert live.wait() == 0, live.story()
    return fingerprint_of(live.folder, num_steps=num_steps)


def fingerprint_of(folder: Path, *, num_steps: int) -> dict[str, Any]:
    """The same, of a pipeline's folder."""
    samples = {}
    for version in range(1, num_steps + 1):
        rows = [json.loads(r) for r in lines_of(folder / f"trajectories/v{version}.jsonl")]
        kept = [[r["tokens"], r["logprobs"], r["versions"], r["reward"]] for r in rows]
        samples[version] = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    lines = [json.loads(line) for line in lines_of(folder / "metrics.jsonl")]
    newest = folder.glob(f"checkpoints/v{num_steps}-e*")
    checkpoint = max(newest, key=lambda path: int(path.name.rpartition("-e")[2]))
    weights = load_file(checkpoint / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].numpy().tobytes())
    return {
        "samples": samples,
        "losses": [(line["version"], line["loss"], line["grad_norm"]) for line in lines],
        "weights": digest.hexdigest(),
    }


def learned(found: dict[str, Any]) -> dict[str, Any]:
    """The same, once it is sure that most steps changed the weights: or equal bits would say little."""
    norms = [norm for _, _, norm in found["losses"]]
    assert sum(norm > 0 for norm in norms) > len(norms) / 2, norms
    return found


def test_how_sequences_are_batched_and_placed_changes_no_bit(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Mode async without staleness, two workers, batches of 3."""
    changes = ("mode.type=async", "mode.max_staleness=0", "rollout.num_workers=2")
    with start(tmp_path, *changes, "rollout.engine.max_running=3") as live:
        assert fingerprint(live) == undisturbed
