"""What a step's generation costs on fewer of a pipeline's rollout workers.

Where several pipelines share devices it can pay to give all sequences of a step to one worker: an
iteration over twice the sequences costs less than two iterations, most of all in the tail, and the
other devices are free for others. `work_history` averages what such steps cost once there were some;
before that, this module says what they should cost.

Source: JigsawRL (arXiv 2604.23838), sub-stage merging, and RLHFless's elastic number of workers.
Deviation: merged before the step, where that costs no prefill, besides in mid-step; a decode iteration
is taken to cost a fixed part and a part per sequence, both fitted to bulk and tail decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from jigsawrl.contract.message import SubStageKind

GENERATION: tuple[SubStageKind, ...] = ("prefill", "bulk_decode", "tool_wait", "tail_decode")
"""In the order of a step."""

DECODES: tuple[SubStageKind, ...] = ("bulk_decode", "tail_decode")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kind in one step, on one worker or several together."""

    work_s: float = 0.0
    num_iterations: float = 0.0
    num_tokens: float = 0.0
    deviation_s: float = 0.0
    """By how much `work_s` of one step is off, usually; sums have none."""

    def __add__(self, other: Work) -> Work:
        return Work(
            work_s=self.work_s + other.work_s,
            num_iterations=self.num_iterations + other.num_iterations,
            num_tokens=self.num_tokens + other.num_tokens,
        )


def gathered(
    spread: Iterable[Mapping[SubStageKind, Work]], *, num_workers: int
) -> dict[SubStageKind, Work]:
    """Work of each of `num_workers` workers that share out what those of `spread` do now. Nothing
    where these say nothing of decode iterations."""
    workers = list(spread)
    bulk, tail = (_total(workers, kind) for kind in DECODES)
    both = bulk + tail
    if not both.num_iterations or not workers:
        return {}
    per_iteration_s, per_token_s = decode_cost_s(bulk, tail)
    # The longest sequence is as long wherever it is generated.
    longest = max(sum(w[kind].num_iterations for kind in DECODES if kind in w) for w in workers)
    in_tail = longest * tail.num_iterations / both.num_iterations
    tail_tokens = in_tail * tail.num_tokens / tail.num_iterations if tail.num_iterations else 0.0
    bulk_tokens = max(0.0, both.num_tokens / num_workers - tail_tokens)
    prefill = _total(workers, "prefill")
    waits_s = [worker["tool_wait"].work_s for worker in workers if "tool_wait" in worker]
    work = {
        "prefill": Work(
            work_s=prefill.work_s / num_workers, num_tokens=prefill.num_tokens / num_workers
        ),
        "bulk_decode": _decode(longest - in_tail, bulk_tokens, per_iteration_s, per_token_s),
        "tail_decode": _decode(in_tail, tail_tokens, per_iteration_s, per_token_s),
        "tool_wait": Work(work_s=max(waits_s, default=0.0)),
    }
    return {
        kind: msgspec.structs.replace(work[kind], deviation_s=_deviation_s(workers, kind))
        for kind in GENERATION
        if work[kind].work_s > 0
    }


def decode_cost_s(bulk: Work, tail: Work) -> tuple[float, float]:
    """(seconds per iteration, seconds per token) that explain both; all per iteration where they
    don't tell them apart."""
    determinant = bulk.num_iterations * tail.num_tokens - tail.num_iterations * bulk.num_tokens
    if determinant:
        per_iteration_s = (
            bulk.work_s * tail.num_tokens - tail.work_s * bulk.num_tokens
        ) / determinant
        per_token_s = (
            tail.work_s * bulk.num_iterations - bulk.work_s * tail.num_iterations
        ) / determinant
        if per_iteration_s > 0 and per_token_s >= 0:
            return per_iteration_s, per_token_s
    both = bulk + tail
    return both.work_s / both.num_iterations, 0.0


def relative_length(
    usual: Iterable[Mapping[SubStageKind, Work]], seen: Iterable[Mapping[SubStageKind, Work]]
) -> float:
    """How long the sequences of a step were, 1 being as usual for steps generated in the same way:
    what its iterations and tokens cost at the usual seconds of each. That says nothing of how fast they
    were made, so it holds for other ways as well."""
    workers, now = list(usual), list(seen)
    bulk, tail = (_total(workers, kind) for kind in DECODES)
    before, after = bulk + tail, _total(now, "bulk_decode") + _total(now, "tail_decode")
    if not before.num_iterations or not after.num_iterations:
        return 1.0
    per_iteration_s, per_token_s = decode_cost_s(bulk, tail)
    usual_s, seen_s = (
        work.num_iterations * per_iteration_s + work.num_tokens * per_token_s
        for work in (before, after)
    )
    return seen_s / usual_s if usual_s > 0 else 1.0


def _decode(
    num_iterations: float, num_tokens: float, per_iteration_s: float, per_token_s: float
) -> Work:
    return Work(
        work_s=num_iterations * per_iteration_s + num_tokens * per_token_s,
        num_iterations=num_iterations,
        num_tokens=num_tokens,
    )


def _deviation_s(workers: Iterable[Mapping[SubStageKind, Work]], kind: SubStageKind) -> float:
    return max((worker[kind].deviation_s for worker in workers if kind in worker), default=0.0)


def _total(workers: Iterable[Mapping[SubStageKind, Work]], kind: SubStageKind) -> Work:
    total = Work()
    for worker in workers:
        total += worker.get(kind, Work())
    return total
