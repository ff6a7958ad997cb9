"""Packing, mini-batches and the permutation control."""

from __future__ import annotations

import msgspec
import pytest
import torch

from jigsawrl.config import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    LinearScheduleConfig,
)
from jigsawrl.config_algorithm import OverlongConfig
from jigsawrl.contract.message import Array
from jigsawrl.contract.records import RewardRecord, SequenceRecord
from jigsawrl.turns import turn_spans
from services.trainer.batch import (
    Sample,
    make_sample,
    pack,
    permute_rewards,
    shape_rewards,
    split_minibatches,
)
from services.trainer.metrics import penalty_mean
from services.trainer.schedule import learning_rate


def test_every_sequence_is_packed_once_within_the_budget(samples: list[Sample]) -> None:
    micros = pack(samples, range(len(samples)), max_tokens=40)
    assert sorted(row for micro in micros for row in micro.rows) == list(range(len(samples)))
    for micro in micros:
        assert micro.tokens_BT.numel() <= 40
        for i, row in enumerate(micro.rows):
            length = len(samples[row].tokens)
            assert torch.equal(micro.tokens_BT[i, :length], samples[row].tokens)
            assert not micro.mask_BT[i, length:].any()


def test_a_sequence_over_the_budget_goes_alone(samples: list[Sample]) -> None:
    assert len(pack(samples, range(len(samples)), max_tokens=1)) == len(samples)


def test_all_ranks_get_the_same_number_of_micro_batches(samples: list[Sample]) -> None:
    packed = [
        pack(samples, range(len(samples)), max_tokens=30, rank=rank, num_ranks=3)
        for rank in range(3)
    ]
    assert len({len(micros) for micros in packed}) == 1
    rows = [row for micros in packed for micro in micros for row in micro.rows]
    assert sorted(rows) == list(range(len(samples)))


def test_minibatches_hold_whole_groups_in_order(samples: list[Sample]) -> None:
    parts = split_minibatches(samples, 2)
    assert [index for part in parts for index in part] == list(range(len(samples)))
    first, second = ({samples[index].group for index in part} for part in parts)
    assert first == {"g0", "g1", "g2"}
    assert second == {"g3", "g4"}


def test_permuted_rewards_are_the_same_rewards_elsewhere(samples: list[Sample]) -> None:
    permuted = permute_rewards(samples, seed=3, version=5)
    before, after = ([s.reward for s in batch] for batch in (samples, permuted))
    assert sorted(before) == sorted(after)
    assert before != after
    assert [s.sequence for s in permuted] == [s.sequence for s in samples]
    assert after == [s.reward for s in permute_rewards(samples, seed=3, version=5)]
    assert after != [s.reward for s in permute_rewards(samples, seed=3, version=6)]


def test_rewards_are_shaped_by_the_generated_tokens_of_the_longest_turn(
    samples: list[Sample],
) -> None:
    lengths = [max(end - begin for begin, end in turn_spans(s.versions.tolist())) for s in samples]
    assert any(int((s.versions >= 0).sum()) > n for s, n in zip(samples, lengths, strict=True))
    overlong = OverlongConfig(buffer_tokens=4, factor=0.5)
    shaped = shape_rewards(samples, overlong, max_new_tokens=10)
    expected = [
        s.reward - max(length - 6, 0) / 4 * 0.5 for s, length in zip(samples, lengths, strict=True)
    ]
    assert [s.reward for s in shaped] == pytest.approx(expected)
    assert penalty_mean(samples, shaped) < 0
    assert shape_rewards(samples, overlong, max_new_tokens=100) == samples


RECORD = SequenceRecord(
    id="r",
    pipeline="p",
    group="g",
    sequence="g/s0",
    epoch=1,
    num_prompt_tokens=1,
    tokens=Array.of("int32", [5, 6, 1]),
    logprobs=Array.of("float32", [0.0, -0.5, -0.25]),
    versions=Array.of("int32", [-1, 3, 3]),
    loss_mask=Array.of("uint8", [0, 1, 1]),
    finish_reason="stop",
)
REWARD = RewardRecord(
    id="w", pipeline="p", sequence="g/s0", epoch=1, reward=1.0, correct=True, response_text="6"
)


def test_a_sample_has_what_its_records_say() -> None:
    sample = make_sample("g", "g/s0", RECORD, REWARD)
    assert sample.tokens.tolist() == [5, 6, 1]
    assert sample.logprobs.tolist() == [0.0, -0.5, -0.25]
    assert sample.mask.tolist() == [False, True, True]
    assert sample.num_loss_tokens == 2
    assert (sample.reward, sample.text) == (1.0, "6")


def test_what_the_environment_said_between_turns_is_no_loss_token() -> None:
    record = msgspec.structs.replace(
        RECORD,
        tokens=Array.of("int32", [5, 6, 1, 7, 8, 1]),
        logprobs=Array.of("float32", [0.0, -0.5, -0.25, 0.0, -1.0, -2.0]),
        versions=Array.of("int32", [-1, 3, 3, -1, 4, 4]),
        loss_mask=Array.of("uint8", [0, 1, 1, 0, 1, 1]),
    )
    sample = make_sample("g", "g/s0", record, REWARD)
    assert sample.num_loss_tokens == 4
    micro = pack([sample], [0], max_tokens=64)[0]
    assert micro.tokens_BT.tolist() == [[5, 6, 1, 7, 8, 1]], "all of it is read"
    assert micro.mask_BT.tolist() == [[False, True, True, False, True, True]]


def test_records_of_another_sequence_are_refused() -> None:
    other = msgspec.structs.replace(REWARD, sequence="g/s1")
    with pytest.raises(ValueError, match="reward of g/s1"):
        make_sample("g", "g/s0", RECORD, other)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ConstantScheduleConfig(warmup_steps=2), [0.5, 1.0, 1.0, 1.0, 1.0]),
        (LinearScheduleConfig(final_fraction=0.2), [1.0, 0.8, 0.6, 0.4, 0.2]),
        (LinearScheduleConfig(warmup_steps=1), [1.0, 1.0, 2 / 3, 1 / 3, 0.0]),
        (CosineScheduleConfig(), [1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_the_learning_rate_ends_exactly_at_the_last_step(
    schedule: ConstantScheduleConfig | LinearScheduleConfig | CosineScheduleConfig,
    expected: list[float],
) -> None:
    rates = [
        learning_rate(schedule, version=version, num_steps=5, base_learning_rate=1.0)
        for version in range(5)
    ]
    assert rates == pytest.approx(expected, abs=1e-6)
