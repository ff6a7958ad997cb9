"""Worlds in which things go wrong, drawn by hypothesis, and what must hold after any of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from jigsawrl.contract.commands import Command
from jigsawrl.core import invariants
from jigsawrl.core.scheduler import Scheduler
from tests.unit.core.world import Faults, World


def drawing(max_examples: int) -> settings:
    """Of a test that draws so many; each takes seconds."""
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


def faults(**probabilities: Sequence[float]) -> st.SearchStrategy[Faults]:
    """Each kind as probable as one of these says, or not at all."""
    drawn = {name: st.sampled_from([0.0, *values]) for name, values in probabilities.items()}
    return st.builds(Faults, **drawn)


def check_world(world: World) -> None:
    """Whatever went wrong: no group is lost or trained twice, and replays give the same commands."""
    check_history(world)
    check_replay(world)
    invariants.check(world.scheduler.state)


def encoded(issued: list[list[Command]]) -> list[bytes]:
    return [msgspec.msgpack.encode(commands) for commands in issued]


def check_history(world: World) -> None:
    """Each trained group stands in exactly one cut of the surviving history."""
    for pipeline in world.scheduler.state.pipelines.values():
        last: dict[int, tuple[str, ...]] = {}
        for cut in world.cuts:
            if cut.worker.id.startswith(f"{pipeline.name}."):
                last[cut.version] = tuple(group.group for group in cut.groups)
                assert all(len(group.sequences) >= 2 for group in cut.groups)
        numbers = Counter(int(g.rpartition("/g")[2]) for cut in last.values() for g in cut)
        assert set(numbers.values()) == {1}
        assert sorted(numbers) == pipeline.group_fates["trained"].numbers()


def check_replay(world: World) -> None:
    """From the first message, from a snapshot in the middle to the end, and from each of some to the
    next: the same commands and, byte for byte, the same state."""
    whole = (0, Scheduler(policies=world.policies).snapshot())
    end = (len(world.log), world.scheduler.snapshot())
    marks = [whole, *list(world.snapshots.items())[::7], end]
    for start, then in [(whole, end), (marks[len(marks) // 2], end), *itertools.pairwise(marks)]:
        check_stretch(world, start, then)


def check_stretch(world: World, start: tuple[int, bytes], end: tuple[int, bytes]) -> None:
    """From a snapshot after so many messages to another one."""
    (first, snapshot), (last, expected) = start, end
    replayed = Scheduler.restore(snapshot, policies=world.policies)
    issued = [
        replayed.handle(event, timestamp_s=timestamp_s, sequence=sequence)
        for event, timestamp_s, sequence in world.log[first:last]
    ]
    assert encoded(issued) == encoded(world.issued[first:last])
    assert replayed.snapshot() == expected
