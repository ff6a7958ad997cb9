"""``python -m loadgen.profile.worker KIND``: one sub-stage kind, run between a `go` and a `stop`.

The profiler starts one process per kind, two for pairs of a kind with itself, and keeps them. The
pipeline's config comes as MessagePack in hex, the first line of standard input; then lines ``go`` and
``stop``; each stop is answered by a line ``iterations seconds``, of whole iterations.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time

import torch

from jigsawrl.config import decode_config
from loadgen.profile.kinds import KINDS, Iteration, build


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m loadgen.profile.worker")
    arguments.add_argument("kind", choices=KINDS)
    kind = arguments.parse_args().kind
    torch.set_num_threads(1)
    iterate = build(decode_config(bytes.fromhex(sys.stdin.readline())), kind)
    for _ in range(3):
        iterate()  # the first ones allocate
    print("ready", flush=True)
    while sys.stdin.readline().strip() == "go":
        print(*_until_stopped(iterate), flush=True)


def _until_stopped(iterate: Iteration) -> tuple[int, float]:
    """(whole iterations, seconds until the last ended)."""
    stopped = threading.Event()

    def listen() -> None:
        sys.stdin.readline()
        stopped.set()

    listening = threading.Thread(target=listen)
    listening.start()
    begun_s, num, ended_s = time.perf_counter(), 0, 0.0
    while not stopped.is_set():
        iterate()
        num += 1
        ended_s = time.perf_counter() - begun_s
    listening.join()
    return num, ended_s


if __name__ == "__main__":
    main()
