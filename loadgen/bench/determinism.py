"""``python -m loadgen.bench.determinism [--json]``: what a deterministic engine costs.

The workload, model and core of `bench.engine`; the fast and the deterministic engine in alternating
order, so that a busy machine slows both alike. The cost is the median over pairs of fast over
deterministic tokens/s: 1.0 is free. Two workloads: all sequences at once, whose batch thins out as
they end, and one sequence at a time, where padding weighs most.
"""

from __future__ import annotations

import json
import statistics
import sys

import msgspec
import torch

from jigsawrl.config import InitModelConfig
from jigsawrl.models.init import build_model
from jigsawrl.models.tokenizer import build_tokenizer
from loadgen.bench.engine import (
    ALPHABET,
    MAX_NEW_TOKENS,
    NUM_SEQUENCES,
    Workload,
    make_workload,
    run_engine,
    use_one_core,
)
from loadgen.bench.output import parser_of, say_of
from services.rollout.engine.sampling import Sampling
from services.rollout.engine.torch_engine import TorchEngine

NUM_PAIRS = 7
NUM_ALONE = 6
"""Sequences of the workload that are also generated one at a time."""


class Cost(msgspec.Struct, frozen=True):
    """Fast against deterministic on one workload."""

    ratio: float
    """Median of the pairs."""
    pairs: list[float]
    fast_tokens_per_s: float
    deterministic_tokens_per_s: float


def main() -> None:
    say = say_of(parser_of("determinism", __doc__).parse_args())
    use_one_core()
    workload = make_workload()
    alone = Workload(workload.prompts[:NUM_ALONE], workload.num_new_tokens[:NUM_ALONE])
    result = {
        "batch": measure(workload, max_running=NUM_SEQUENCES),
        "alone": measure(alone, max_running=1),
    }
    for name, cost in result.items():
        say(
            f"{name}: fast {cost.fast_tokens_per_s:,.0f} tokens/s, deterministic"
            f" {cost.deterministic_tokens_per_s:,.0f}; cost {cost.ratio} {cost.pairs}"
        )
    print(json.dumps({"ratio": result["batch"].ratio, **msgspec.to_builtins(result)}))
    sys.stdout.flush()


def measure(workload: Workload, *, max_running: int) -> Cost:
    """Alternating pairs on one workload, after one run of each to warm up."""
    engines = [_engine(max_running, deterministic=deterministic) for deterministic in (False, True)]
    for engine in engines:
        run_engine(engine, workload)
    durations_s: list[list[float]] = [[], []]
    for pair in range(NUM_PAIRS):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            durations_s[side].append(run_engine(engines[side], workload))
    fast_s, exact_s = durations_s
    pairs = [exact / fast for fast, exact in zip(fast_s, exact_s, strict=True)]
    num_tokens = sum(workload.num_new_tokens)
    return Cost(
        ratio=round(statistics.median(pairs), 3),
        pairs=[round(ratio, 3) for ratio in pairs],
        fast_tokens_per_s=round(num_tokens / statistics.median(fast_s), 1),
        deterministic_tokens_per_s=round(num_tokens / statistics.median(exact_s), 1),
    )


def _engine(max_running: int, *, deterministic: bool) -> TorchEngine:
    model = build_model(InitModelConfig(), build_tokenizer(ALPHABET), seed=0).eval()
    model.config.eos_token_id = None  # every sequence has exactly its wanted length
    engine = TorchEngine(
        sampling=Sampling(max_new_tokens=MAX_NEW_TOKENS),
        max_running=max_running,
        device=torch.device("cpu"),
        dtype=torch.float32,
        deterministic=deterministic,
    )
    engine.load_weights(
        model.state_dict(), model_config=model.config.to_json_string(), version=0, keep_kv=True
    )
    return engine


if __name__ == "__main__":
    main()
