"""``python -m services.scheduler.why STATE_DIR [PIPELINE]``: what each worker does, and why.

Prints, as of the last recorded event: every tenant with its device, share and work; what the pipeline
waits for; how far predictions were off; and the last decisions of the look-ahead, with the makespan
that each expected against the one without it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from jigsawrl.core import phases
from jigsawrl.core.outlook import Decided
from jigsawrl.core.state import Pipeline, State
from jigsawrl.core.status import pipeline_status
from jigsawrl.core.work_history import median_error
from services.scheduler.recorded import last_state

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
    yield f"last {min(NUM_DECISIONS, len(decisions))} of {len(decisions)} recorded decisions:"
    for decision in decisions[-NUM_DECISIONS:]:
        yield from _decision(decision)


def _pipeline(state: State, pipeline: Pipeline) -> Iterator[str]:
    error = median_error(pipeline.errors)
    told = "nothing predicted yet" if error is None else f"predictions off by {error:.0%} (median)"
    yield f"{pipeline.name}: {pipeline.stage}, version {pipeline.version}; {told}"
    kinds = phases.current_kinds(pipeline) if pipeline.active else {}
    for tenant in pipeline.tenants.values():
        share = "" if tenant.share is None else f", share {tenant.share:.2f}"
        if tenant.applied_share is not None:
            share += f" (applied {tenant.applied_share:.2f})"
        where = tenant.device or "no device"
        yield f"  {tenant.id}: {kinds.get(tenant.id, 'idle')} on {where}{share}"
    for wait in pipeline_status(state, pipeline).waiting_for:
        yield f"  waits for {wait}"


def _decision(decision: Decided) -> Iterator[str]:
    gain = (
        1 - decision.makespan_s / decision.default_makespan_s if decision.default_makespan_s else 0
    )
    yield (
        f"  {decision.now_s:.1f} s: expects the next steps to end in {decision.makespan_s:.2f} s,"
        f" {gain:.0%} sooner than without look-ahead ({decision.num_expanded} nodes played)"
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
        for line in explain(last_state(arguments.folder), arguments.pipeline):
            print(line)
    except ValueError as error:
        print(f"jigsaw why: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
