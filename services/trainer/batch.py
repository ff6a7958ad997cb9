"""From the references of a `BatchCut` to padded micro-batches. Called by the trainer (loading) and by
the step (packing); it knows nothing of models.

Shape letters: B sequences, T tokens, N loss tokens of a micro-batch in row-major order.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from jigsawrl.algorithms.shaping import overlong_penalty
from jigsawrl.bus.base import Bus
from jigsawrl.config_algorithm import OverlongConfig
from jigsawrl.contract.commands import BatchCut, TrainedSequence
from jigsawrl.contract.message import Array
from jigsawrl.contract.records import RewardRecord, SequenceRecord
from jigsawrl.turns import turn_spans

LOAD_CONCURRENCY = 32
"""Records asked for at once: enough to hide the round trip, few enough to bound memory in flight."""

_DTYPES = {"int32": torch.int32, "float32": torch.float32, "uint8": torch.uint8}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence to train on, with its reward."""

    group: str
    sequence: str
    num_prompt_tokens: int
    tokens: Tensor
    """int64 [T], prompt first."""
    logprobs: Tensor
    """float32 [T], the engine's."""
    versions: Tensor
    """int32 [T]; -1 where not generated."""
    mask: Tensor
    """bool [T], True where trained; never at position 0, which nothing predicts."""
    reward: float
    text: str

    @property
    def num_loss_tokens(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Right-padded rows of one forward pass. Causal attention keeps padding out of all real
    positions, so no attention mask is needed."""

    rows: tuple[int, ...]
    """Indices into the samples that were packed."""
    tokens_BT: Tensor
    mask_BT: Tensor
    num_tokens: int
    """Without padding."""


Loaded = tuple[str, str, Any, Any]
"""Group and sequence as the cut names them, and what lies under their references."""


async def load_records(bus: Bus, cut: BatchCut) -> list[Loaded]:
    """The records of a cut in its order; no torch, so that an event loop may do it. Raises
    `RecordGoneError`."""
    limit = asyncio.Semaphore(LOAD_CONCURRENCY)

    async def load(group: str, trained: TrainedSequence) -> Loaded:
        async with limit:
            record = await bus.load(trained.record)
            reward = await bus.load(trained.reward)
        return group, trained.sequence, record, reward

    wanted = [(group.group, trained) for group in cut.groups for trained in group.sequences]
    return list(await asyncio.gather(*(load(group, trained) for group, trained in wanted)))


def make_sample(group: str, sequence: str, record: Any, reward: Any) -> Sample:
    """One sample from its two records; raises ValueError where they are not those that the cut
    names."""
    if not isinstance(record, SequenceRecord) or not isinstance(reward, RewardRecord):
        raise ValueError(f"sequence {sequence}: its references name other kinds of records")
    if (record.group, record.sequence, reward.sequence) != (group, sequence, sequence):
        raise ValueError(
            f"sequence {sequence} of group {group}: its references name {record.sequence} of"
            f" {record.group} and the reward of {reward.sequence}"
        )
    mask = _tensor(record.loss_mask).bool()
    if len(mask) < 2 or mask[0]:
        raise ValueError(f"sequence {sequence}: needs a prompt before what is trained")
    return Sample(
        group=group,
        sequence=sequence,
        num_prompt_tokens=record.num_prompt_tokens,
        tokens=_tensor(record.tokens).long(),
        logprobs=_tensor(record.logprobs),
        versions=_tensor(record.versions),
        mask=mask,
        reward=reward.reward,
        text=reward.response_text,
    )


def shape_rewards(
    samples: Sequence[Sample], overlong: OverlongConfig, *, max_new_tokens: int
) -> list[Sample]:
    """Rewards less what DAPO's overlong punishment takes. A length counts generated tokens; of several
    turns, each of which has `max_new_tokens`, the longest one is punished."""
    return [
        replace(
            sample,
            reward=sample.reward
            + overlong_penalty(
                max(
                    (end - begin for begin, end in turn_spans(sample.versions.tolist())), default=0
                ),
                max_tokens=max_new_tokens,
                buffer_tokens=overlong.buffer_tokens,
                factor=overlong.factor,
            ),
        )
        for sample in samples
    ]


def permute_rewards(samples: Sequence[Sample], *, seed: int, version: int) -> list[Sample]:
    """The control experiment: rewards shuffled over the whole batch, the same way for the same
    (seed, version)."""
    generator = torch.Generator().manual_seed(_mixed(seed, version))
    order = torch.randperm(len(samples), generator=generator).tolist()
    return [
        replace(sample, reward=samples[source].reward)
        for sample, source in zip(samples, order, strict=True)
    ]


def _mixed(seed: int, version: int) -> int:
    """64 bits, whatever the size of the seed."""
    digest = hashlib.blake2b(f"{seed}/{version}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def split_minibatches(samples: Sequence[Sample], num_minibatches: int) -> list[list[int]]:
    """Indices of each mini-batch: whole groups in cut order, as even as their number allows."""
    groups = list(dict.fromkeys(sample.group for sample in samples))
    part_of = {group: i * num_minibatches // len(groups) for i, group in enumerate(groups)}
    parts: list[list[int]] = [[] for _ in range(num_minibatches)]
    for index, sample in enumerate(samples):
        parts[part_of[sample.group]].append(index)
    return [part for part in parts if part]


def pack(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    max_tokens: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[MicroBatch]:
    """This rank's micro-batches: its sequences by falling length, as many per row block as keep the
    padded size within `max_tokens` (a longer sequence goes alone).

    All ranks get the same number, since each forward pass is a collective: some get empty ones."""
    ordered = sorted(indices, key=lambda index: -len(samples[index].tokens))
    split = [_fill(samples, ordered[r::num_ranks], max_tokens) for r in range(num_ranks)]
    num_wanted = max(len(rows) for rows in split)
    own = split[rank]
    return [_micro_batch(samples, own[i] if i < len(own) else []) for i in range(num_wanted)]


def split_rows(
    values_N: Tensor, micro: MicroBatch, samples: Sequence[Sample]
) -> tuple[Tensor, ...]:
    """The values of the loss tokens of a micro-batch, row by row."""
    lengths = [samples[row].num_loss_tokens for row in micro.rows]
    return torch.split(values_N, lengths) if lengths else ()


def _fill(samples: Sequence[Sample], ordered: Sequence[int], max_tokens: int) -> list[list[int]]:
    blocks: list[list[int]] = []
    width = 0
    for index in ordered:
        if not blocks or (len(blocks[-1]) + 1) * width > max_tokens:
            blocks.append([])
            width = len(samples[index].tokens)
        blocks[-1].append(index)
    return blocks


def _micro_batch(samples: Sequence[Sample], rows: Sequence[int]) -> MicroBatch:
    width = max((len(samples[row].tokens) for row in rows), default=2)
    tokens_BT = torch.zeros(max(len(rows), 1), width, dtype=torch.int64)
    mask_BT = torch.zeros(max(len(rows), 1), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(samples[row].tokens)
        tokens_BT[i, :length] = samples[row].tokens
        mask_BT[i, :length] = samples[row].mask
    return MicroBatch(
        rows=tuple(rows),
        tokens_BT=tokens_BT,
        mask_BT=mask_BT,
        num_tokens=sum(len(samples[row].tokens) for row in rows),
    )


def _tensor(array: Array) -> Tensor:
    dtype: Literal["int32", "float32", "uint8"] = array.dtype  # type: ignore[assignment]
    if not array.data:
        return torch.empty(array.shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(bytearray(array.data), dtype=_DTYPES[dtype]).reshape(array.shape)
