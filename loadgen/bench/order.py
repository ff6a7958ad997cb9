"""``python -m loadgen.bench.order``: what longest first gains where sequences wait for a slot.

Plays an engine of a few slots in simulated steps, with the queue that the real one has. Lengths are
log-normal; samples of a group are alike to a stated degree.
A step costs what one of a CPU slot does (docs/rollout.md). Printed per case: the time of the last end
in order of admission over that with longest first, the median of the seeds and the least, beside the
same ratio for an order that knows all lengths.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from random import Random
from statistics import NormalDist, median

from services.rollout.engine.base import SequenceStart
from services.rollout.engine.waiting import Waiting

MEDIAN_TOKENS, P95_TOKENS, MAX_TOKENS = 64, 512, 1024
NUM_GROUPS, GROUP_SIZE = 16, 8
NUM_SEEDS = 31

Lengths = dict[str, int]


def drawn(seed: int, *, alike: float) -> Lengths:
    """By key, ``<group>/<index>``; `alike` is the correlation of log-lengths within a group."""
    random = Random(seed)
    sigma = math.log(P95_TOKENS / MEDIAN_TOKENS) / NormalDist().inv_cdf(0.95)
    lengths = {}
    for group in range(NUM_GROUPS):
        common = random.gauss(0, math.sqrt(alike))
        for index in range(GROUP_SIZE):
            own = common + random.gauss(0, math.sqrt(1 - alike))
            length = round(MEDIAN_TOKENS * math.exp(sigma * own))
            lengths[f"{group}/{index}"] = min(MAX_TOKENS, max(1, length))
    return lengths


def step_cost(num_running: int) -> float:
    """Relative to one sequence: 2.0 at 32, 2.4 at 64, 4.0 at 128."""
    return 1.1 + num_running / 43


def makespan(lengths: Lengths, keys: Iterable[str], *, num_slots: int, probes: bool) -> float:
    """Until all have ended, queued in the order of `keys`."""
    waiting = Waiting()
    waiting.add(
        SequenceStart(
            key=key, group=key.partition("/")[0], seed=0, prompt=(0,), longest_first=probes
        )
        for key in keys
    )
    running: dict[str, int] = {}
    total = 0.0

    def by_group() -> Lengths:
        longest: Lengths = {}
        for key, made in running.items():
            group = key.partition("/")[0]
            longest[group] = max(longest.get(group, 0), made)
        return longest

    while waiting or running:
        if len(waiting) and len(running) < num_slots:
            taken = waiting.take(num_slots - len(running), running=by_group)
            running |= {start.key: 0 for start in taken}
        total += step_cost(len(running))
        running = {key: made + 1 for key, made in running.items()}
        for key in [key for key, made in running.items() if made >= lengths[key]]:
            waiting.ended(key.partition("/")[0], num_tokens=running.pop(key))
    return total


def gain(lengths: Lengths, *, num_slots: int) -> tuple[float, float]:
    """Of longest first over the order of admission, and of the order that knows all lengths."""
    known = sorted(lengths, key=lambda key: -lengths[key])
    admitted = makespan(lengths, lengths, num_slots=num_slots, probes=False)
    probed = makespan(lengths, lengths, num_slots=num_slots, probes=True)
    return admitted / probed, admitted / makespan(lengths, known, num_slots=num_slots, probes=False)


def main() -> int:
    """One JSON line per case."""
    for alike in (0.0, 0.5, 0.8, 0.95):
        for num_slots in (8, 16, 32, 64, NUM_GROUPS * GROUP_SIZE):
            worlds = [drawn(seed, alike=alike) for seed in range(NUM_SEEDS)]
            ratios = [gain(lengths, num_slots=num_slots) for lengths in worlds]
            gains, known = zip(*ratios, strict=True)
            line = {
                "alike": alike,
                "slots": num_slots,
                "gain": round(median(gains), 3),
                "least": round(min(gains), 3),
                "gain_if_known": round(median(known), 3),
            }
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
