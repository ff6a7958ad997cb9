"""``python -m loadgen.bench.modes [--json]``: mode async against sync on a workload with a long tail.

Whole runs of the system on this machine, with real training: the same pipeline in both modes, in
alternating order, so that a busy machine slows both alike. Lengths are drawn (log-normal, median 32,
p95 256, at most 512 tokens): few sequences of a batch are many times as long as the others; in sync
the trainer waits for them and the engine then waits for the trainer. The figure is the median over
pairs of async over sync trained tokens/s, from version 0 to the end.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from loadgen.bench.output import parser_of, say_of
from loadgen.bench.whole_run import run

PIPELINE = """
name = "long-tail"

[model]
type = "init"
hidden_size = 128
intermediate_size = 384
num_layers = 2
max_position_embeddings = 640

[task]
type = "sort-digits"
num_held_out = 50

[rollout]
sampling.max_new_tokens = 512
engine.max_running = 128
engine.drawn_lengths = {median_tokens = 32, p95_tokens = 256, max_tokens = 512}

[algorithm]
group_size = 8

[trainer]
num_steps = 20
groups_per_batch = 8
checkpoint.every = 100

[evaluation]
enabled = false
"""
ASYNC = (
    'mode.type="async"',
    "mode.max_staleness=1",
    'algorithm.correction.type="truncate"',
)
NUM_PAIRS = 3


def main() -> None:
    say = say_of(parser_of("modes", __doc__).parse_args())
    speeds: dict[str, list[float]] = {"sync": [], "async": []}
    with tempfile.TemporaryDirectory(prefix="jigsaw-modes-") as folder:
        path = Path(folder) / "pipeline.toml"
        path.write_text(PIPELINE)
        for pair in range(NUM_PAIRS):
            for mode in ("sync", "async") if pair % 2 == 0 else ("async", "sync"):
                changes = ASYNC if mode == "async" else ()
                measured = run([path], folder=Path(folder) / "runs", changes=changes)
                speed = measured.trained_tokens_per_s["long-tail"]
                speeds[mode].append(speed)
                say(f"pair {pair + 1} of {NUM_PAIRS}: {mode} {speed:,.0f} trained tokens/s")
    pairs = [a / s for a, s in zip(speeds["async"], speeds["sync"], strict=True)]
    result = {
        "ratio": round(statistics.median(pairs), 3),
        "pairs": [round(ratio, 3) for ratio in pairs],
        "tokens_per_s": statistics.median(speeds["async"]),
        "baseline_tokens_per_s": statistics.median(speeds["sync"]),
    }
    print(json.dumps(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
