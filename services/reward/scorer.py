"""``python -m services.reward.scorer``: one process that scores, one sample at a time.

It is a process of its own so that a response on which a scorer spins or dies costs one sample, not
the service: `services.reward.pool` kills it at the deadline. What a scorer raises beside ValueError
ends the process, which the pool reports as that sample's failure.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO

from jigsawrl.tasks import Task, build_task
from services.reward.frames import Ready, Result, Sample, Setup, Unscorable, read, write


def serve(task: Task, requests: BinaryIO, replies: BinaryIO) -> None:
    """Score samples until the pipe ends."""
    write(replies, Ready())
    while isinstance(sample := read(requests), Sample):
        try:
            scored = task.score(sample.fields, sample.response)
        except ValueError as error:
            write(replies, Unscorable(reason=str(error)))
        else:
            write(replies, Result(reward=scored.reward, correct=scored.correct))


def claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the pool. Standard output becomes standard error, so that what a scorer prints
    cannot garble a frame."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return sys.stdin.buffer, replies


def main() -> None:
    """Until standard input ends."""
    requests, replies = claim_pipes()
    setup = read(requests)
    if isinstance(setup, Setup):
        serve(build_task(setup.task, seed=setup.seed), requests, replies)


if __name__ == "__main__":
    main()
