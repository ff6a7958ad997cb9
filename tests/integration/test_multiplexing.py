"""Several pipelines on the same cores: none computes anything else than it would alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jigsawrl.contract.events import SequencesExported, SharesApplied
from services.scheduler.recorded import events_of, last_state
from tests.integration.live_run import LiveRun, conserved
from tests.integration.test_exactness import EXACT, fingerprint_of, learned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 10
PIPELINE = """
name = "{name}"
seed = {seed}

[model]
type = "init"
hidden_size = 64
intermediate_size = 128
num_layers = 2
num_heads = 2
num_kv_heads = 1
max_position_embeddings = 400
warmup.max_steps = 2000

[task]
type = "sort-digits"
min_digits = 2
max_digits = 3
num_held_out = 50

[rollout]
num_workers = 2
sampling.max_new_tokens = 380
engine.drawn_lengths = {{median_tokens = 24, p95_tokens = 256, max_tokens = 380}}

[algorithm]
group_size = 4
overlong = {{buffer_tokens = 370, factor = 1.0}}

[trainer]
groups_per_batch = 6
"""
"""Lengths of a long tail, so that tails are merged; the punishment of long ones is learned from."""

NAMES = ("tiny", "other")
TEXTS = [PIPELINE.format(name=name, seed=seed) for seed, name in enumerate(NAMES)]
CHANGES = (*EXACT, f"trainer.num_steps={NUM_STEPS}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each by itself, one after the other."""
    with LiveRun(
        tmp_path_factory.mktemp("alone"), *CHANGES, pipeline=TEXTS[0], others=TEXTS[1:]
    ) as live:
        assert live.wait(300) == 0, live.story()
        assert all(p["num_migrations"] == 0 for p in live.summary()["pipelines"].values())
        return {
            name: learned(fingerprint_of(live.run_folder / name, num_steps=NUM_STEPS))
            for name in NAMES
        }


@pytest.mark.parametrize("policy", ["rlix", "jigsaw"])
def test_beside_each_other_no_bit_changes(
    alone: dict[str, Any], tmp_path: Path, policy: str
) -> None:
    """Under `shuffle`, which places as `unmanaged` does, see below."""
    with LiveRun(tmp_path, *CHANGES, pipeline=TEXTS[0], others=TEXTS[1:], policy=policy) as live:
        assert live.wait(300) == 0, live.story()
        for name in NAMES:
            found = fingerprint_of(live.run_folder / name, num_steps=NUM_STEPS)
            assert found == alone[name], name
        pipelines = live.summary()["pipelines"].values()
        states = last_state(live.run_folder / "scheduler").pipelines.values()
    assert all(conserved(p["groups"]) and conserved(p["sequences"]) for p in pipelines)
    assert all(p["num_tokens_again"] == 0 for p in pipelines)
    moved = sum(p["num_migrations"] for p in pipelines)
    gathered = any(state.work.gathered for state in states)
    assert moved > 0 or gathered


def test_hundreds_of_moves_and_changed_shares_change_no_bit(
    alone: dict[str, Any], tmp_path: Path
) -> None:
    """Counted from the recorded events; of the shares what was really applied."""
    with LiveRun(tmp_path, *CHANGES, pipeline=TEXTS[0], others=TEXTS[1:], policy="shuffle") as live:
        assert live.wait(400) == 0, live.story()
        for name in NAMES:
            found = fingerprint_of(live.run_folder / name, num_steps=NUM_STEPS)
            assert found == alone[name], name
        pipelines = live.summary()["pipelines"].values()
    assert all(conserved(p["groups"]) and conserved(p["sequences"]) for p in pipelines)
    assert all(p["num_tokens_again"] == 0 for p in pipelines)
    moved = dict.fromkeys(NAMES, 0)
    divisions: dict[str, list[dict[str, tuple[float, float]]]] = {}
    for event, _, _ in events_of(live.run_folder / "scheduler"):
        if isinstance(event, SequencesExported) and event.pipeline is not None:
            moved[event.pipeline] += len(event.exported)
        if isinstance(event, SharesApplied):
            applied = {one.tenant: (one.asked, one.applied) for one in event.shares}
            told = divisions.setdefault(event.device, [])
            if not told or told[-1] != applied:
                told.append(applied)
    assert sum(moved.values()) == sum(p["num_migrations"] for p in pipelines)
    assert min(moved.values()) >= 200, moved
    assert len(divisions) == 2, "both pipelines are on both cores"
    for device, told in divisions.items():
        both = [
            shares for shares in told if {name.partition(".")[0] for name in shares} == {*NAMES}
        ]
        assert len(both) >= 100, (device, len(both))
        assert sum(min(shares.values())[0] == 0 for shares in both) >= 100, "somebody is held"
