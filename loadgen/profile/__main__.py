"""``python -m loadgen.profile PIPELINE.toml --to FILE``: see `jigsaw profile`.

Two measurements on one device, with the pipeline's model: what an iteration of decoding costs at each
batch size, which says where the tail begins; and how fast each pair of sub-stage kinds runs at each
share split, against each kind alone. Shares are applied by the actuator that the node uses.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement
from pathlib import Path

import msgspec
import torch

from jigsawrl.cli.config_file import load_config
from jigsawrl.cli.errors import ConfigError
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.message import SubStageKind
from jigsawrl.contract.profile import DecodeCost, DeviceProfile, SlowdownProfile, SlowdownRow
from jigsawrl.core.slowdown import LEVELS
from jigsawrl.devices.cpu import CpuActuator
from loadgen.profile.kinds import KINDS, decode
from loadgen.profile.workers import Worker, start_workers

WINDOW_S = 1.0
"""Of one measurement: some tens of iterations of the slowest kind of a small model."""
TAIL_COST = 1.2
"""Decoding is a tail where an iteration costs at most this many times that of one sequence."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
NUM_STEPS = 40
LEAST_SPEED = 0.01
"""Of one that ended no iteration in its window."""


def main() -> int:
    """Exit status 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.profile", description=__doc__)
    parser.add_argument("pipeline", type=Path, metavar="PIPELINE.toml", help="whose model is run")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="a JSON file")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.pipeline)
        if not arguments.to.parent.is_dir():
            raise ConfigError(f"--to {arguments.to}: there is no such folder")
    except ConfigError as error:
        print(f"jigsaw profile: {error}", file=sys.stderr)
        return 2
    profile = measure(config, say=lambda text: print(text, flush=True))
    arguments.to.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    print(f"wrote {arguments.to}")
    return 0


def measure(config: PipelineConfig, *, say: Callable[[str], None]) -> DeviceProfile:
    """Everything, on the last core of this machine."""
    torch.set_num_threads(1)  # two threads on one core would wait for each other
    core = max(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        decode_s = {size: decode_cost_s(config, size) for size in BATCHES}
    finally:
        os.sched_setaffinity(0, before)
    tail = max(size for size, cost_s in decode_s.items() if cost_s <= TAIL_COST * decode_s[1])
    for size, cost_s in decode_s.items():
        say(f"decode {size:4d} sequences: {cost_s * 1e3:.2f} ms, {cost_s / decode_s[1]:.2f} of one")
    say(f"the tail begins at {tail} sequences")
    rows = slowdown_rows(config, core=core, say=say)
    slowdown = SlowdownProfile(
        device_kind="cpu",
        source=f"jigsaw profile of {config.name} on one core of {platform.machine()}",
        rows=tuple(rows),
    )
    costs = (DecodeCost(num_sequences=n, iteration_s=cost_s) for n, cost_s in decode_s.items())
    return DeviceProfile(slowdown=slowdown, decode_s=tuple(costs), tail_sequences=tail)


def decode_cost_s(config: PipelineConfig, num_sequences: int) -> float:
    """Median seconds of an iteration, prefills left out."""
    step = decode(config, num_sequences)
    for _ in range(3):
        step()
    durations_s = []
    for _ in range(NUM_STEPS):
        begun_s = time.perf_counter()
        step()
        durations_s.append(time.perf_counter() - begun_s)
    return statistics.median(durations_s)


def slowdown_rows(
    config: PipelineConfig,
    *,
    core: int,
    say: Callable[[str], None],
    kinds: Sequence[SubStageKind] = KINDS,
    window_s: float = WINDOW_S,
) -> list[SlowdownRow]:
    """Each kind alone at full share first: all speeds are fractions of that."""
    actuator = CpuActuator()
    device = f"profile/cpu{core}"
    rows: list[SlowdownRow] = []
    with start_workers(config, kinds, core=core) as workers:
        try:
            alone = {}
            for kind in kinds:
                worker = workers[kind][0]
                actuator.apply(device, {kind: (worker.pid, 1.0)})
                alone[kind] = _rates([worker], window_s)[0]
            for first, second in combinations_with_replacement(kinds, 2):
                pair = workers[first][0], workers[second][1]
                for share in LEVELS[:-1]:
                    shares = share, 1 - share
                    applied = actuator.apply(
                        device,
                        {
                            f"{i}": (w.pid, s)
                            for i, (w, s) in enumerate(zip(pair, shares, strict=True))
                        },
                    )
                    if applied.fell_back is not None:
                        say(f"shares are only approximate: {applied.fell_back}")
                    speeds = [
                        rate / alone[kind]
                        for rate, kind in zip(_rates(pair, window_s), (first, second), strict=True)
                    ]
                    rows += _rows((first, second), shares, speeds)
                    say(
                        f"{first} {shares[0]:g} beside {second} {shares[1]:g}: speeds"
                        f" {speeds[0]:.2f} and {speeds[1]:.2f}, together {sum(speeds):.2f}"
                    )
        finally:
            actuator.restore()
    return rows


def _rates(workers: Sequence[Worker], window_s: float) -> list[float]:
    """Iterations per second of workers that run together for a window."""
    for worker in workers:
        worker.go()
    time.sleep(window_s)
    for worker in workers:
        worker.stop()
    return [num / seconds if seconds else 0.0 for num, seconds in (w.result() for w in workers)]


def _rows(
    kinds: tuple[SubStageKind, SubStageKind], shares: tuple[float, float], speeds: list[float]
) -> list[SlowdownRow]:
    both = [
        SlowdownRow(
            kind=kinds[i],
            share=shares[i],
            beside=kinds[1 - i],
            beside_share=shares[1 - i],
            speed=round(min(max(speeds[i], LEAST_SPEED), 1.0), 4),
        )
        for i in (0, 1)
    ]
    return both if kinds[0] != kinds[1] else both[:1]


if __name__ == "__main__":
    sys.exit(main())
