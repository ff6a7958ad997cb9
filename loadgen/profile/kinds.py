"""The sub-stage kinds that compute, each as work without end: one call is one iteration.

Called by the profiler's worker processes. The model is the pipeline's; what it is fed is arbitrary, as
cost does not depend on which tokens they are. Kinds that only wait use no device and are not measured;
what moves bytes (weight sync, checkpoints) depends on disk and bus more than on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from jigsawrl.config import InitModelConfig, PipelineConfig
from jigsawrl.contract.message import SubStageKind
from jigsawrl.models.init import build_model
from jigsawrl.models.loading import DTYPES, load_model
from jigsawrl.models.tokenizer import build_tokenizer
from services.rollout.engine.base import SequenceStart
from services.rollout.engine.sampling import Sampling
from services.rollout.engine.torch_engine import TorchEngine

ALPHABET = "0123456789+-*/=() "
NUM_PROMPT_TOKENS = 64
NUM_NEW_TOKENS = 128
"""Of a profiled sequence: the cost of an iteration hardly depends on them for small models."""
NUM_PREFILLED = 16
BULK_SEQUENCES = 64
TAIL_SEQUENCES = 2
BATCH_SEQUENCES, BATCH_TOKENS = 8, 128
"""Shape of one forward-backward."""

Iteration = Callable[[], None]


def build(config: PipelineConfig, kind: SubStageKind) -> Iteration:
    """One iteration of a kind; raises ValueError for one that is not profiled."""
    builders: dict[str, Callable[[PipelineConfig], Iteration]] = {
        "prefill": prefill,
        "bulk_decode": lambda config: decode(config, BULK_SEQUENCES),
        "tail_decode": lambda config: decode(config, TAIL_SEQUENCES),
        "reference_logprobs": lambda config: forward(config, backward=False),
        "forward_backward": lambda config: forward(config, backward=True),
    }
    if kind not in builders:
        raise ValueError(f"{kind} is not profiled; profiled are {', '.join(builders)}")
    return builders[kind](config)


KINDS: tuple[SubStageKind, ...] = (
    "prefill",
    "bulk_decode",
    "tail_decode",
    "reference_logprobs",
    "forward_backward",
)


def decode(config: PipelineConfig, num_sequences: int) -> Iteration:
    """A step of so many running sequences."""
    engine = _engine(config, max_running=num_sequences)
    numbers = itertools.count()

    def step() -> None:
        missing = num_sequences - engine.num_running - engine.num_waiting
        engine.add(_start(next(numbers), num_new=NUM_NEW_TOKENS) for _ in range(missing))
        engine.step()

    return step


def prefill(config: PipelineConfig) -> Iteration:
    """Prompts of a few groups, and the one token that must follow."""
    engine = _engine(config, max_running=NUM_PREFILLED)
    numbers = itertools.count()

    def step() -> None:
        engine.add(_start(next(numbers), num_new=1) for _ in range(NUM_PREFILLED))
        engine.step()

    return step


def forward(config: PipelineConfig, *, backward: bool) -> Iteration:
    """Log-probs of one micro-batch, and their gradients."""
    model = _model(config)
    tokens_BT = torch.zeros(BATCH_SEQUENCES, BATCH_TOKENS, dtype=torch.int64)

    def step() -> None:
        with torch.set_grad_enabled(backward):
            logits_BTV = model(input_ids=tokens_BT).logits
            loss = logits_BTV.log_softmax(-1)[..., 0].mean()
        if backward:
            loss.backward()
            model.zero_grad(set_to_none=True)

    return step


def _start(number: int, *, num_new: int) -> SequenceStart:
    prompt = tuple(1 + (number + i) % 8 for i in range(NUM_PROMPT_TOKENS))
    return SequenceStart(
        key=str(number), group=str(number), seed=number, prompt=prompt, max_new_tokens=num_new
    )


def _engine(config: PipelineConfig, *, max_running: int) -> TorchEngine:
    model = _model(config).eval()
    model.config.eos_token_id = None  # or sequences would end when they like
    wanted = config.rollout.engine.deterministic
    engine = TorchEngine(
        sampling=Sampling(max_new_tokens=NUM_NEW_TOKENS),
        max_running=max_running,
        device=torch.device("cpu"),
        dtype=DTYPES[config.rollout.engine.dtype],
        deterministic="preferred" if wanted == "auto" else wanted,
    )
    engine.load_weights(
        model.state_dict(), model_config=model.config.to_json_string(), version=0, keep_kv=True
    )
    return engine


def _model(config: PipelineConfig) -> Any:
    if isinstance(config.model, InitModelConfig):
        return build_model(config.model, build_tokenizer(ALPHABET), seed=0)
    return load_model(config.model.path, dtype=torch.float32)
