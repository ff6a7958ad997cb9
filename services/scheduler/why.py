"""``python -m services.scheduler.why STATE_DIR [PIPELINE]``: what each worker does, and why.

Prints, as of the last recorded event: every tenant with its device, share, work and the reason for it;
what the pipeline waits for; how far predictions were off; and the last decisions of the
look-ahead, with what each expected against the list schedule, and, once its steps have ended, how long
these really took.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from jigsawrl.core.outlook import Decided
from jigsawrl.core.state import Pipeline, State
from jigsawrl.core.status import pipeline_status
from jigsawrl.core.work_history import median_error
from services.scheduler.reasons import doing
from services.scheduler.recorded import last_state, print_lines

NUM_DECISIONS = 8


def explain(state: State, pipeline: str | None = None) -> Iterator[str]:
    """Lines for people; raises ValueError for an unknown pipeline."""
    if pipeline is not None and pipeline not in state.pipelines:
        known = ", ".join(state.pipelines) or "none"
        raise ValueError(f"no pipeline {pipeline}; there are: {known}")
    shown = [p for p in state.pipelines.values() if pipeline in (None, p.name)]
    yield f"policy {state.policy}, {state.clock.now_s:.1f} s of stream time"
    for one in shown:
        yield from _pipeline(state, one)
    names = {one.name for one in shown}
    decisions = [d for d in state.outlooks.decisions if names & _pipelines(d)]
    yield from _effect(state, decisions)
    yield f"last {min(NUM_DECISIONS, len(decisions))} of {len(decisions)} recorded decisions:"
    for decision in decisions[-NUM_DECISIONS:]:
        yield from _decision(state, decision)


def _pipeline(state: State, pipeline: Pipeline) -> Iterator[str]:
    error = median_error(pipeline.errors)
    told = "nothing predicted yet" if error is None else f"predictions off by {error:.0%} (median)"
    yield f"{pipeline.name}: {pipeline.stage}, version {pipeline.version}; {told}"
    for tenant in pipeline.tenants.values():
        share = "" if tenant.share is None else f", share {tenant.share:.2f}"
        if tenant.applied_share is not None:
            share += f" (applied {tenant.applied_share:.2f})"
        where = tenant.device or "no device"
        what, why = doing(state, pipeline, tenant)
        yield f"  {tenant.id}: {what} on {where}{share}: {why}"
    for wait in pipeline_status(state, pipeline).waiting_for:
        yield f"  waits for {wait}"


def took_s(state: State, decision: Decided) -> float | None:
    """From a decision until the last of the steps that it looked at had ended; None while one has not,
    or did not in this history."""
    ends: list[float] = []
    for name, version in decision.until.items():
        pipeline = state.pipelines.get(name)
        end_s = None if pipeline is None else pipeline.version_s.get(version)
        if end_s is None or end_s < decision.now_s:
            return None
        ends.append(end_s)
    return max(ends) - decision.now_s if ends else None


def _effect(state: State, decisions: list[Decided]) -> Iterator[str]:
    """Of all decisions that are recorded."""
    told = [(one, took) for one in decisions if (took := took_s(state, one)) is not None]
    predicted = [(one, took) for one, took in told if one.makespan_s > 0]
    if predicted:
        ratio = median(took / one.makespan_s for one, took in predicted)
        gain = median(_gain(one) for one, _ in predicted)
        yield (
            f"{len(predicted)} decisions whose steps have ended: these took {ratio:.2f} times what"
            f" was predicted, which was {gain:.1%} less than by the list schedule (medians)"
        )


def _gain(decision: Decided) -> float:
    """Predicted, as a fraction of the makespan of the list schedule."""
    default_s = decision.default_makespan_s
    return 1 - decision.makespan_s / default_s if default_s else 0.0


def _decision(state: State, decision: Decided) -> Iterator[str]:
    steps = ", ".join(f"{name} to version {v}" for name, v in decision.until.items())
    took = took_s(state, decision)
    actual = "they have not ended" if took is None else f"they took {took:.2f} s"
    if took is not None and decision.makespan_s > 0:
        actual += f", {took / decision.makespan_s:.2f} times that"
    yield (
        f"  {decision.now_s:.1f} s: expects the next steps to end in {decision.makespan_s:.2f} s,"
        f" {_gain(decision):.1%} sooner than by the list schedule ({decision.num_expanded} nodes"
        f" played); {actual} ({steps})"
    )
    for node, share in decision.shares.items():
        yield f"    {'hold' if share == 0 else f'share {share:g}'}: {node}"
    for node, device in decision.moves.items():
        yield f"    merge: {node} to {device}"


def _pipelines(decision: Decided) -> set[str]:
    return {node.partition("/")[0] for node in (*decision.shares, *decision.moves)}


def main() -> int:
    """Exit status 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m services.scheduler.why")
    parser.add_argument("folder", type=Path, metavar="STATE_DIR", help="RUN/scheduler of a run")
    parser.add_argument("pipeline", nargs="?", metavar="PIPELINE", help="default: all")
    arguments = parser.parse_args()
    try:
        print_lines(explain(last_state(arguments.folder), arguments.pipeline))
    except ValueError as error:
        print(f"jigsaw why: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
