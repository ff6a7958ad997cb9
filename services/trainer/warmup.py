"""Supervised warm-up of a model from nothing: it learns the task's form, and some of its content, until
a stated share of fresh problems is solved. Called by the learner before reinforcement learning starts;
after it there is no supervised loss any more.

Shape letters: B problems, T tokens, V vocabulary.

Each step draws problems never seen before and measures them *before* training on them: a problem is
solved where each token of its answer, the end of sequence included, is the argmax under teacher
forcing. That equals greedy decoding: both go wrong first at the same token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jigsawrl.config import WarmupConfig
from jigsawrl.models.tokenizer import encode
from jigsawrl.tasks import Task

FIRST_CURSOR = 2**40
"""Warm-up problems come from far along the training stream: reinforcement learning, which starts at 0,
does not meet them again (where the task has enough of them: a file repeats its lines)."""
WINDOW_BATCHES = 8
"""The share solved is a mean over this many batches: with 64 problems each its deviation is 0.02."""
NUM_RISE_STEPS = 20
"""Linear rise of the learning rate: Adam's first steps have little to divide by."""
MAX_GRAD_NORM = 1.0
REPORT_EVERY_STEPS = 20
IGNORED = -100
"""The target that cross_entropy leaves out."""

Report = Callable[[int, float], None]
"""Told (steps done, share solved)."""


@dataclass(frozen=True, kw_only=True)
class WarmupResult:
    """How it ended."""

    num_steps: int
    accuracy: float
    """Over the last batches."""


def warm_up(
    model: Any,
    *,
    task: Task,
    tokenizer: Any,
    config: WarmupConfig,
    report: Report = lambda num_steps, accuracy: None,
    check_stop: Callable[[], None] = lambda: None,
) -> WarmupResult:
    """Train `model` in place, unsharded; raises ValueError where `max_steps` do not suffice."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    recent: deque[float] = deque(maxlen=WINDOW_BATCHES)
    accuracy = 0.0
    for step in range(config.max_steps):
        check_stop()
        first = FIRST_CURSOR + step * config.batch_size
        tokens_BT, targets_BT = supervised_batch(
            task, tokenizer, cursors=range(first, first + config.batch_size)
        )
        logits_BTV = model(input_ids=tokens_BT.to(device), use_cache=False).logits
        targets_BT = targets_BT.to(device)
        recent.append(share_solved(logits_BTV.detach(), targets_BT))
        accuracy = sum(recent) / len(recent)
        if step % REPORT_EVERY_STEPS == 0:
            report(step, accuracy)
        if len(recent) == WINDOW_BATCHES and accuracy >= config.target_accuracy:
            report(step, accuracy)
            return WarmupResult(num_steps=step, accuracy=accuracy)
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / NUM_RISE_STEPS)
        optimizer.step()
    raise ValueError(
        f"model.warmup: {config.max_steps} steps reached an accuracy of {accuracy:.3f}, not the"
        f" target_accuracy of {config.target_accuracy}; raise max_steps or lower the target"
    )


def supervised_batch(task: Task, tokenizer: Any, *, cursors: range) -> tuple[Tensor, Tensor]:
    """(inputs, targets), int64 [B, T], right-padded: the target at a position is the next token of
    the answer, `IGNORED` in prompt and padding."""
    rows: list[tuple[list[int], int]] = []
    for cursor in cursors:
        problem = task.train(cursor)
        prompt = encode(tokenizer, problem.prompt)
        answer = encode(tokenizer, problem.fields["answer"])
        rows.append(([*prompt, *answer, tokenizer.eos_token_id], len(prompt)))
    width = max(len(tokens) for tokens, _ in rows) - 1
    tokens_BT = torch.full((len(rows), width), tokenizer.pad_token_id)
    targets_BT = torch.full((len(rows), width), IGNORED)
    for i, (tokens, num_prompt) in enumerate(rows):
        tokens_BT[i, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        targets_BT[i, num_prompt - 1 : len(tokens) - 1] = torch.tensor(tokens[num_prompt:])
    return tokens_BT, targets_BT


def share_solved(logits_BTV: Tensor, targets_BT: Tensor) -> float:
    """Share of rows whose every target is the argmax."""
    right_BT = (logits_BTV.argmax(dim=-1) == targets_BT) | (targets_BT == IGNORED)
    return float(right_BT.all(dim=1).double().mean())
