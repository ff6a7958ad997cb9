"""Records: the data itself, stored on a pipeline's data stream (or the weight channel) and acked
before the event that refers to it is published."""

from __future__ import annotations

import msgspec

from jigsawrl.contract.message import Array, Count, DType, FinishReason, Message


class Record(Message, frozen=True, kw_only=True):
    """Base of all records."""

    pipeline: str


class GroupRecord(Record, frozen=True, kw_only=True):
    """One prompt, by the environment."""

    group: str
    epoch: Count
    cursor: Count
    prompt_tokens: Array
    """int32 [P]."""
    prompt_text: str
    problem: dict[str, str]
    """The fields the reward needs, ``answer`` among them."""


class SequenceRecord(Record, frozen=True, kw_only=True):
    """One sample, append-only, by a rollout worker: progress (incomplete) or finish (complete)."""

    group: str
    sequence: str
    epoch: Count
    num_prompt_tokens: Count
    tokens: Array
    """int32 [T], prompt first."""
    logprobs: Array
    """float32 [T], of the distribution sampled from (temperature, top-k and top-p applied);
    0 where nothing was generated."""
    versions: Array
    """int32 [T], policy version that made the token; -1 where it was not generated: in the prompt and
    in what the environment said between two turns."""
    loss_mask: Array
    """uint8 [T], 1 where the token is generated and trained."""
    finish_reason: FinishReason | None
    """Of the last turn; None while incomplete."""
    turn_finish_reason: FinishReason | None = None
    """Of the last turn, while the sequence waits for what its environment says to it."""

    def __post_init__(self) -> None:
        sizes = {a.shape for a in (self.tokens, self.logprobs, self.versions, self.loss_mask)}
        if len(sizes) != 1:
            raise ValueError(
                f"sequence {self.sequence}: tokens, logprobs, versions and loss_mask differ in"
                f" length: {sorted(sizes)}"
            )


class RewardRecord(Record, frozen=True, kw_only=True):
    """One score, by the reward service."""

    sequence: str
    epoch: Count
    reward: float
    correct: bool
    response_text: str


class WeightTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies in the concatenated payload."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset_bytes: Count
    num_bytes: Count


class WeightManifest(Record, frozen=True, kw_only=True):
    """Describes one published version; stored after all its chunks."""

    incarnation: Count
    version: Count
    tensors: tuple[WeightTensor, ...]
    num_bytes: Count
    num_chunks: Count
    chunk_bytes: Count
    sha256: str
    """Of the concatenated payload, hexadecimal."""
    model_config: str
    """The Hugging Face ``config.json`` of the model."""


class WeightChunk(Record, frozen=True, kw_only=True):
    """One piece of a version's payload."""

    incarnation: Count
    version: Count
    index: Count
    data: bytes


class DeadLetter(Record, frozen=True, kw_only=True):
    """A message that could not be decoded or handled; kept with the reason, counted, never fatal."""

    stream: str
    subject: str
    stream_sequence: Count
    reason: str
    payload: bytes
    """Cut to 64 KiB."""
    pipeline: str = ""


RecordType = GroupRecord | SequenceRecord | RewardRecord | WeightManifest | WeightChunk | DeadLetter
