"""The protocol of a move message by message, and the rule that gathers a tail."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import Worker
from jigsawrl.core import ids, invariants, tally
from jigsawrl.core.group import Sequence
from jigsawrl.core.migration import MIN_STAY_S, Move, merge_tail
from jigsawrl.core.state import Pipeline
from jigsawrl.core.status import pipeline_status
from tests.unit.core.movers import Once
from tests.unit.core.rollouts import Made, num_tokens_of
from tests.unit.core.tenants import Process
from tests.unit.core.world import Faults, World, asynchronous, spec

T = TypeVar("T", bound=c.Command)
SOURCE, TARGET = "p.rollout0", "p.rollout1"


@pytest.fixture
def world() -> Iterator[World]:
    """A kind world that moves what a test tells it to; whatever happened, the invariants hold."""
    made = World(seed=0, faults=Faults(), pipelines=[spec(num_rollout_workers=3)], policy=Once())
    yield made
    invariants.check(made.scheduler.state)


def pipeline_of(world: World) -> Pipeline:
    return world.scheduler.state.pipelines["p"]


def issued(world: World, kind: type[T]) -> list[T]:
    return [command for batch in world.issued for command in batch if isinstance(command, kind)]


def sequence_of(world: World, name: str) -> Sequence:
    number, index = ids.parse_sequence("p", name) or (-1, -1)
    return pipeline_of(world).groups[number].sequences[index]


def process_of(world: World, name: str) -> Process:
    return world.processes[name]


def longest_on(world: World, worker: str, *, first_group: int) -> str:
    """A running sequence with some way to go."""
    held = [n for n in process_of(world, worker).held if sequence_of(world, n).stage == "running"]
    late = [n for n in held if (ids.parse_sequence("p", n) or (-1, -1))[0] >= first_group]
    return max(late, key=num_tokens_of)


def order(world: World, *, first_group: int = 0) -> str:
    """Have one sequence moved from SOURCE to TARGET; returns when the command is out."""
    world.run_until(lambda: pipeline_of(world).version == 0 and bool(issued(world, c.LoadWeights)))
    world.run_until(lambda: len(process_of(world, SOURCE).parts) >= 3)
    start_s = world.now_s
    world.run_until(lambda: world.now_s > start_s + 0.15)
    name = longest_on(world, SOURCE, first_group=first_group)
    policy = world.policies[Once.name]
    assert isinstance(policy, Once)
    policy.orders.append(Move(sequence=name, target=TARGET))
    world.run_until(lambda: bool(issued(world, c.MigrateSequences)))
    return name


def placements(world: World, name: str) -> list[tuple[str, c.Placement]]:
    return [
        (x.worker.id, p)
        for x in issued(world, c.PlaceSequences)
        for p in x.placements
        if p.sequence == name
    ]


def exports(world: World) -> list[e.SequencesExported]:
    return [event for event, _, _ in world.log if isinstance(event, e.SequencesExported)]


def end(world: World) -> None:
    world.run()
    assert pipeline_of(world).stage == "finished"
    invariants.check(world.scheduler.state)


def test_a_move_takes_three_messages_and_makes_no_token_twice(world: World) -> None:
    name = order(world)
    command = issued(world, c.MigrateSequences)[0]
    assert (command.worker, command.sequences) == (process_of(world, SOURCE).worker, ((name, 1),))
    sequence = sequence_of(world, name)
    assert (sequence.stage, sequence.owner, sequence.target) == ("moving", command.worker, TARGET)
    waits = pipeline_status(world.scheduler.state, pipeline_of(world)).waiting_for
    assert f"{SOURCE} to hand over to {TARGET} {name}" in waits
    world.run_until(lambda: len(placements(world, name)) == 2)
    export = exports(world)[0].exported[0]
    worker, placement = placements(world, name)[1]
    assert export.num_tokens > 0
    assert (worker, placement.epoch, placement.resume) == (TARGET, 2, export.ref)
    assert placement.min_version == export.max_version
    end(world)
    status = pipeline_status(world.scheduler.state, pipeline_of(world))
    assert (status.num_migrations, status.num_migrated_tokens) == (1, export.num_tokens)
    assert status.num_tokens_again == 0
    assert world.num_made[name] == num_tokens_of(name)


def say(
    world: World, worker: Worker, *, exported: tuple[parts.SequenceExport, ...] = (), **rest: object
) -> None:
    world.publish(
        e.SequencesExported(
            id=world.new_id("forged"), pipeline="p", worker=worker, exported=exported, **rest
        )
    )


def test_only_the_owner_answers_for_what_it_was_asked(world: World) -> None:
    name = order(world)
    owner = process_of(world, SOURCE).worker
    asked = sequence_of(world, name)
    ignored, before = world.scheduler.state.num_ignored, (asked.epoch, asked.stage)

    def export(sequence: str, epoch: int) -> tuple[parts.SequenceExport, ...]:
        ref = world.new_ref()
        return (
            parts.SequenceExport(
                sequence=sequence, epoch=epoch, ref=ref, num_tokens=1, min_version=0, max_version=0
            ),
        )

    others = [n for n in process_of(world, SOURCE).held if n != name]
    say(world, Worker(owner.id, "older"), exported=export(name, 1))
    say(world, process_of(world, TARGET).worker, exported=export(name, 1))
    say(world, owner, exported=export(name, 0))
    say(world, owner, exported=export(others[0], 1))  # its own, but nobody asked
    say(world, owner, exported=export("p/g99/s0", 1), not_held=(parts.Held("no id", 1),))
    say(world, owner, finished=(parts.Held(others[0], 1),), not_held=(parts.Held(others[1], 1),))
    assert world.scheduler.state.num_ignored == ignored + 8
    assert (asked.epoch, asked.stage) == before
    say(world, owner, exported=export(name, 1))
    assert (asked.epoch, asked.owner) == (2, None)
    say(world, owner, exported=export(name, 1))  # a repeat
    assert world.scheduler.state.num_ignored == ignored + 9
    assert pipeline_of(world).num_migrations == 1


def test_a_sequence_that_ended_before_the_order_stays_with_its_owner(world: World) -> None:
    name = order(world)
    say(world, process_of(world, SOURCE).worker, finished=(parts.Held(name, 1),))
    assert (sequence_of(world, name).stage, sequence_of(world, name).target) == ("running", None)
    end(world)


def test_what_the_source_does_not_hold_restarts_elsewhere(world: World) -> None:
    name = order(world)
    say(world, process_of(world, SOURCE).worker, not_held=(parts.Held(name, 1),))
    world.run_until(lambda: len(placements(world, name)) == 2)
    assert placements(world, name)[1][1].epoch == 2
    end(world)
    assert pipeline_of(world).num_tokens_again > 0


def test_a_target_must_have_the_newest_version_in_the_record() -> None:
    world = World(
        seed=0,
        faults=Faults(),
        pipelines=[asynchronous(2, num_rollout_workers=3)],
        policy=Once(),
    )
    name = order(world, first_group=6)  # of a batch that version 1 does not wait for
    ref = world.new_ref()
    world.records[ref] = Made(name, 1, (0, 1))
    entry = parts.SequenceExport(
        sequence=name, epoch=1, ref=ref, num_tokens=1, min_version=0, max_version=1
    )
    say(world, process_of(world, SOURCE).worker, exported=(entry,))
    assert pipeline_of(world).tenants[TARGET].version == 0
    waits = pipeline_status(world.scheduler.state, pipeline_of(world)).waiting_for
    assert f"{TARGET} to take {name}" in waits
    world.run_until(lambda: len(placements(world, name)) == 2)
    worker, placement = placements(world, name)[1]
    assert (worker, placement.min_version, placement.resume) == (TARGET, 1, ref)
    assert pipeline_of(world).tenants[TARGET].version == 1
    end(world)


def test_an_order_without_an_answer_ends_with_its_lease(world: World) -> None:
    name = order(world)
    process_of(world, SOURCE).frozen = True
    start_s = world.now_s
    world.run_until(lambda: len(placements(world, name)) == 2)
    assert 4.9 < world.now_s - start_s < 6
    worker, placement = placements(world, name)[1]
    assert worker != SOURCE
    assert placement.epoch == 2
    process_of(world, SOURCE).frozen = False
    end(world)


def test_a_source_that_was_cut_off_and_returns_is_told_to_drop_what_it_lost(world: World) -> None:
    name = order(world)
    source = process_of(world, SOURCE)
    source.isolated_until_s = world.now_s + 34
    source.parts.clear()  # frozen, too: it holds all it had when it returns
    lost = dict(source.held)
    world.run_until(lambda: pipeline_of(world).tenants[SOURCE].lost)
    world.run_until(lambda: not source.held)
    dropped = {n for drop in issued(world, c.Drop) for n, _ in drop.sequences}
    assert set(lost) <= dropped
    assert name in dropped
    end(world)


def before_the_command(world: World, name: str) -> bool:
    return process_of(world, SOURCE).parts.get(name) is not None


def before_the_export(world: World, name: str) -> bool:
    return process_of(world, SOURCE).parts.get(name) is None and not exports(world)


def after_the_export(world: World, name: str) -> bool:
    return bool(exports(world))


def after_the_placement(world: World, name: str) -> bool:
    return process_of(world, TARGET).held.get(name) == 2


@pytest.mark.parametrize("victim", [SOURCE, TARGET])
@pytest.mark.parametrize(
    "moment", [before_the_command, before_the_export, after_the_export, after_the_placement]
)
def test_who_dies_at_whatever_moment_of_a_move_the_sequence_lives(
    world: World, moment: Callable[[World, str], bool], victim: str
) -> None:
    name = order(world)
    world.run_until(lambda: moment(world, name))
    world.kill(process_of(world, victim))
    world.run_until(lambda: len(placements(world, name)) >= 2)
    epochs = [placement.epoch for _, placement in placements(world, name)]
    assert epochs == sorted(set(epochs))
    end(world)
    assert world.num_made[name] >= num_tokens_of(name)


# --- Merging -------------------------------------------------------------------------------------


def tail(world: World, counts: dict[str, int]) -> list[str]:
    """Let so many sequences of each worker run, the others be scored; those that run, by name."""
    world.run_until(lambda: pipeline_of(world).version == 0 and bool(pipeline_of(world).groups))
    world.run_until(
        lambda: all(
            s.stage == "running" for g in pipeline_of(world).groups.values() for s in g.sequences
        )
    )
    left = dict(counts)
    names = []
    for group in pipeline_of(world).groups.values():
        for sequence in group.sequences:
            assert sequence.owner is not None
            if left.get(sequence.owner.id, 0) > 0:
                left[sequence.owner.id] -= 1
                names.append(ids.sequence_id("p", group.number, sequence.index))
            else:
                tally.leave(pipeline_of(world), sequence)
                sequence.stage, sequence.owner = "scored", None
    assert not any(left.values())
    return names


def merged(world: World, max_sequences: int) -> list[tuple[str, str]]:
    moves = merge_tail(pipeline_of(world), max_sequences=max_sequences, now_s=100.0)
    assert all(sequence_of(world, move.sequence).owner for move in moves)
    return [(sequence_of(world, m.sequence).owner.id, m.target) for m in moves]  # type: ignore[union-attr]


R0, R1, R2 = "p.rollout0", "p.rollout1", "p.rollout2"


@pytest.mark.parametrize(
    ("counts", "max_sequences", "expected"),
    [
        ({R0: 1, R1: 3, R2: 1}, 8, [(R0, R1), (R2, R1)]),  # to the one that holds the most
        ({R0: 2, R1: 2}, 8, [(R1, R0), (R1, R0)]),  # ties by id
        ({R0: 3, R1: 2, R2: 1}, 3, [(R2, R1)]),  # two workers are needed: one sequence moves
        ({R0: 3, R1: 1, R2: 1}, 2, []),  # three are needed
        ({R0: 3, R1: 3, R2: 3}, 3, []),  # not yet a tail of fewer
        ({R0: 3, R1: 3, R2: 1}, 4, [(R2, R0)]),
        ({R1: 3}, 8, []),  # on one worker already
        ({}, 8, []),
    ],
)
def test_a_tail_goes_to_the_fewest_workers_with_the_fewest_moves(
    world: World, counts: dict[str, int], max_sequences: int, expected: list[tuple[str, str]]
) -> None:
    tail(world, counts)
    assert merged(world, max_sequences) == expected


def test_nothing_is_merged_while_anything_is_on_its_way(world: World) -> None:
    first = sequence_of(world, tail(world, {R0: 1, R1: 3})[0])
    assert merged(world, 8) == [(R0, R1)]
    owner = first.owner
    for stage in ("placed", "moving", "waiting"):
        first.stage = stage  # type: ignore[assignment]
        assert merged(world, 8) == []
    first.stage, first.owner = "running", owner
    pipeline_of(world).tenants[R1].version = 1
    assert merged(world, 8) == [], "other weights"
    pipeline_of(world).tenants[R1].version = 0


def test_what_was_merged_stays_for_a_while(world: World) -> None:
    first = sequence_of(world, tail(world, {R0: 1, R1: 3})[0])
    first.num_moves, first.moved_s = 1, 100.0 - MIN_STAY_S + 0.1
    assert merged(world, 8) == []
    first.moved_s = 100.0 - MIN_STAY_S
    assert merged(world, 8) == [(R0, R1)]
