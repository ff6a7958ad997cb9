"""Tiny models and engines for the engine's tests, and transformers as the reference."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.rollout.engine.base import Generated, SequenceStart, Work
from services.rollout.engine.lengths import DrawnLengths
from services.rollout.engine.sampling import Sampling
from services.rollout.engine.torch_engine import TorchEngine

VOCAB_SIZE = 40
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    # Large weights, so that the logits of untrained models lie well apart.
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny_model(kind: str = "qwen3", *, seed: int = 0, **options: Any) -> Any:
    """``qwen3`` · ``qwen3-tied`` · ``llama`` · ``llama-biased`` (with scaled rotary angles)."""
    torch.manual_seed(seed)
    shape = {**SHAPE, **options}
    if kind.startswith("qwen3"):
        config = Qwen3Config(**shape, tie_word_embeddings=kind == "qwen3-tied")
        return randomised(Qwen3ForCausalLM(config).eval())
    if kind == "llama-biased":
        shape |= {"attention_bias": True, "mlp_bias": True}
        shape["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    return randomised(LlamaForCausalLM(LlamaConfig(**shape)).eval())


def randomised(model: Any) -> Any:
    """Norm weights and biases start at 1 and 0, where mistakes with them would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def engine_of(
    model: Any,
    *,
    max_running: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    deterministic: bool = False,
    tail_sequences: int | None = None,
    lengths: DrawnLengths | None = None,
    **sampling: Any,
) -> TorchEngine:
    """An engine with the model's weights as version 0."""
    engine = TorchEngine(
        sampling=Sampling(**{"max_new_tokens": 24, **sampling}),
        max_running=max_running,
        device=torch.device(device),
        dtype=dtype,
        deterministic=deterministic,
        tail_sequences=tail_sequences,
        lengths=lengths,
    )
    load(engine, model, version=0)
    return engine


def load(engine: TorchEngine, model: Any, *, version: int, keep_kv: bool = True) -> None:
    engine.load_weights(
        model.state_dict(),
        model_config=model.config.to_json_string(),
        version=version,
        keep_kv=keep_kv,
    )


def groups(num_groups: int = 4, group_size: int = 3, *, seed: int = 1) -> list[SequenceStart]:
    """Sequences with prompts of 1 to 20 tokens."""
    rng = random.Random(seed)
    prompts = [
        tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 7, 20])))
        for _ in range(num_groups)
    ]
    return [
        SequenceStart(key=f"{g}/{i}", group=str(g), seed=rng.getrandbits(64), prompt=prompt)
        for g, prompt in enumerate(prompts)
        for i in range(group_size)
    ]


def run(engine: TorchEngine, starts: list[SequenceStart]) -> dict[str, Generated]:
    """Generate to the end."""
    engine.add(starts)
    return finish(engine)[0]


def finish(engine: TorchEngine) -> tuple[dict[str, Generated], list[Work]]:
    """Step until nothing is held."""
    finished: dict[str, Generated] = {}
    work: list[Work] = []
    while engine.held():
        step = engine.step()
        finished |= {one.key: one for one in step.finished}
        work += step.work
    return finished, work


def reference_logprobs(
    model: Any, start: SequenceStart, tokens: list[int], *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs [T] of the generated tokens by transformers' forward over the whole sequence."""
    ids = torch.tensor([[*start.prompt, *tokens]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, :-1].float() / temperature
    logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(start.prompt) - 1 :]


def largest_gap(model: Any, starts: list[SequenceStart], finished: dict[str, Generated]) -> float:
    """Largest difference between the engine's log-probs and transformers'."""
    gaps = [
        (
            reference_logprobs(model, s, finished[s.key].tokens)
            - torch.tensor(finished[s.key].logprobs)
        )
        .abs()
        .max()
        .item()
        for s in starts
    ]
    return max(gaps)
