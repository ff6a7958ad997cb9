"""What the scheduler decides in single situations."""

from collections.abc import Iterator
from typing import Any

import pytest

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import Worker
from jigsawrl.contract.spec import EvaluationSpec
from jigsawrl.core import ids, invariants
from jigsawrl.core.history import data_needed_from
from jigsawrl.core.status import pipeline_status
from tests.unit.core.queries import issued, pipeline_of
from tests.unit.core.rollouts import Made
from tests.unit.core.world import KIND, Faults, World, spec


@pytest.fixture
def world() -> Iterator[World]:
    """One kind world with the pipeline ``p``; whatever the test did to it, the invariants hold."""
    made = World(seed=0, faults=KIND, pipelines=[spec()])
    yield made
    invariants.check(made.scheduler.state)


def running(world: World) -> list[Any]:
    return [
        sequence
        for group in pipeline_of(world).groups.values()
        for sequence in group.sequences
        if sequence.stage == "running"
    ]


def test_serial_places_all_tenants_over_the_devices(world: World) -> None:
    world.run_until(lambda: bool(issued(world, c.StartTenant)))
    assert {s.tenant: s.device for s in issued(world, c.StartTenant)} == {
        "p.environment0": None,
        "p.reward0": None,
        "p.trainer0": "node/cpu0",
        "p.evaluation0": "node/cpu1",
        "p.rollout0": "node/cpu1",
        "p.rollout1": "node/cpu0",
    }


def test_command_ids_are_stream_sequence_and_index(world: World) -> None:
    world.run()
    for (_, _, sequence), batch in zip(world.log, world.issued, strict=True):
        assert [command.id for command in batch] == [f"{sequence}.{i}" for i in range(len(batch))]
        assert all(command.leader_epoch == 1 for command in batch)


def test_in_sync_exactly_a_batch_is_admitted_per_version_and_groups_stay_whole(
    world: World,
) -> None:
    world.run()
    assert [len(make.orders) for make in issued(world, c.MakeGroups)] == [3, 3, 3]
    owners: dict[str, set[str]] = {}
    for place in issued(world, c.PlaceSequences):
        for placement in place.placements:
            group = placement.sequence.rpartition("/")[0]
            owners.setdefault(group, set()).add(place.worker.id)
    assert all(len(workers) == 1 for workers in owners.values())
    assert set.union(*owners.values()) == {"p.rollout0", "p.rollout1"}
    cursors = [cut.ledger.cursor for cut in issued(world, c.BatchCut)]
    assert cursors == [3, 6, 9]


def test_a_placement_that_is_not_accepted_goes_elsewhere_under_a_new_epoch() -> None:
    world = World(seed=0, faults=Faults(lose=1.0), pipelines=[spec()])
    world.faulty = False
    world.run_until(lambda: bool(issued(world, c.PlaceSequences)))
    world.faulty = True
    world.run_until(lambda: len(issued(world, c.PlaceSequences)) >= 4)
    seen: dict[str, list[tuple[int, str]]] = {}
    for command in issued(world, c.PlaceSequences):
        for p in command.placements:
            seen.setdefault(p.sequence, []).append((p.epoch, command.worker.id))
    for placements in seen.values():
        assert [epoch for epoch, _ in placements] == [1, 2]
        assert placements[0][1] != placements[1][1]
    world.faulty = False
    world.run()
    invariants.check(world.scheduler.state)


def test_a_new_boot_frees_what_the_old_one_owned(world: World) -> None:
    world.run_until(lambda: len(running(world)) > 3)
    process = world.processes["p.rollout0"]
    owned = [s for s in running(world) if s.owner == process.worker]
    epochs = [s.epoch for s in owned]
    assert owned
    process.alive = False
    boot = Worker(id="p.rollout0", boot="other")
    world.publish(
        e.WorkerStarted(id="s", pipeline="p", worker=boot, role="rollout", node="node", device=None)
    )
    assert [s.epoch for s in owned] == [epoch + 1 for epoch in epochs]
    late = e.SequencesFinished(
        id="f",
        pipeline="p",
        worker=process.worker,
        finished=(),
        failed=(parts.SequenceFailure(sequence="p/g0/s0", epoch=1, reason="late"),),
    )
    before = world.scheduler.state.num_ignored
    world.publish(late)
    assert world.scheduler.state.num_ignored == before + 1


def test_a_progress_record_is_where_the_next_owner_goes_on(world: World) -> None:
    world.run_until(lambda: len(running(world)) > 3)
    process = world.processes["p.rollout0"]
    name, epoch = next(iter(process.held.items()))
    ref = world.new_ref()
    world.records[ref] = Made(name, 1, (0, 0))
    progress = parts.SequenceProgress(sequence=name, epoch=epoch, ref=ref, num_tokens=1)
    world.publish(
        e.SequencesProgressed(id="g", pipeline="p", worker=process.worker, progress=(progress,))
    )
    world.kill(process)
    world.run()
    again = [p for x in issued(world, c.PlaceSequences) for p in x.placements if p.sequence == name]
    assert [(p.epoch, p.resume) for p in again] == [(1, None), (2, ref)]
    number, index = ids.parse_sequence("p", name) or (-1, -1)
    assert {p.seed for p in again} == {ids.sequence_seed(1, number, index)}


def test_what_a_worker_holds_but_does_not_own_is_dropped(world: World) -> None:
    world.run_until(lambda: len(running(world)) > 3)
    process = world.processes["p.rollout0"]
    held = (*(parts.Held(n, x) for n, x in process.held.items()), parts.Held("p/g99/s0", 4))
    world.publish(e.Inventory(id="i", pipeline="p", worker=process.worker, held=held))
    world.run_until(lambda: bool(issued(world, c.Drop)))
    assert issued(world, c.Drop)[0].sequences == (("p/g99/s0", 4),)


def test_a_running_sequence_missing_from_two_inventories_is_placed_again(world: World) -> None:
    world.run_until(lambda: len(running(world)) > 3)
    process = world.processes["p.rollout0"]
    lost = next(iter(process.held))
    del process.held[lost]
    for i in range(2):
        held = tuple(parts.Held(n, x) for n, x in process.held.items())
        world.publish(e.Inventory(id=f"i{i}", pipeline="p", worker=process.worker, held=held))
    world.run()
    again = [p for x in issued(world, c.PlaceSequences) for p in x.placements if p.sequence == lost]
    assert [p.epoch for p in again] == [1, 2]


def test_a_reward_counts_once_and_only_from_whom_it_was_asked(world: World) -> None:
    world.run_until(lambda: bool(issued(world, c.ScoreSequences)))
    asked = issued(world, c.ScoreSequences)[0]
    order = asked.orders[0]
    ignored = world.scheduler.state.num_ignored

    def say(sequence: str, epoch: int, reward: float, worker: Worker) -> None:
        entry = parts.SequenceReward(
            sequence=sequence, epoch=epoch, ref=world.new_ref(), reward=reward
        )
        world.publish(
            e.SequencesRewarded(
                id=world.new_id("forged"), pipeline="p", worker=worker, rewarded=(entry,), failed=()
            )
        )

    say("p/g999/s0", 1, 5.0, asked.worker)  # unknown
    say("no id at all", 1, 5.0, asked.worker)
    say(f"p/g{'9' * 5000}/s0", 1, 5.0, asked.worker)
    say(f"other{order.sequence[1:]}", order.epoch, 5.0, asked.worker)  # of another pipeline
    say(order.sequence, order.epoch - 1, 5.0, asked.worker)  # an old owner's
    say(order.sequence, order.epoch, 5.0, Worker(id="p.reward9", boot="x"))
    assert world.scheduler.state.num_ignored == ignored + 6
    say(order.sequence, order.epoch, 1.0, asked.worker)
    say(order.sequence, order.epoch, 7.0, asked.worker)
    assert world.scheduler.state.num_ignored == ignored + 7
    assert pipeline_status(world.scheduler.state, pipeline_of(world)).num_ignored == 7
    parsed = ids.parse_sequence("p", order.sequence)
    assert parsed is not None
    assert pipeline_of(world).groups[parsed[0]].sequences[parsed[1]].score == 1.0
    world.run()
    assert pipeline_of(world).stage == "finished"


def test_a_group_below_its_least_size_fails_and_the_next_prompt_takes_its_slot(
    world: World,
) -> None:
    world.run_until(lambda: len(running(world)) == 9)
    group = next(iter(pipeline_of(world).groups.values()))
    owner = group.sequences[0].owner
    assert owner is not None
    failed = tuple(
        parts.SequenceFailure(sequence=f"p/g{group.number}/s{i}", epoch=1, reason="no")
        for i in range(2)
    )
    world.publish(
        e.SequencesFinished(id="f", pipeline="p", worker=owner, finished=(), failed=failed)
    )
    world.run()
    status = pipeline_status(world.scheduler.state, pipeline_of(world))
    assert (status.groups.failed, status.groups.trained, status.groups.admitted) == (1, 9, 10)
    assert (status.sequences.failed, status.sequences.discarded) == (2, 1)
    assert any("p/g0/s2" in dict(drop.sequences) for drop in issued(world, c.Drop))


def test_a_group_with_a_token_of_an_older_version_is_stale_and_gives_its_slot_back(
    world: World,
) -> None:
    world.run_until(lambda: pipeline_of(world).version == 1 and len(running(world)) == 9)
    group = next(iter(pipeline_of(world).groups.values()))
    owner = group.sequences[0].owner
    assert owner is not None
    old = parts.SequenceFinish(
        sequence=f"p/g{group.number}/s0",
        epoch=1,
        ref=world.new_ref(),
        finish_reason="stop",
        num_tokens=1,
        min_version=0,
        max_version=1,
    )
    world.publish(e.SequencesFinished(id="f", pipeline="p", worker=owner, finished=(old,)))
    world.run()
    status = pipeline_status(world.scheduler.state, pipeline_of(world))
    assert (status.groups.stale, status.groups.trained, status.groups.admitted) == (1, 9, 10)
    assert status.sequences.stale == 3


def test_a_pipeline_whose_groups_all_fail_is_given_up_with_the_reason() -> None:
    world = World(seed=0, faults=Faults(fail_work=1.0), pipelines=[spec()])
    world.run()
    failure = pipeline_of(world).failure
    assert failure is not None
    assert "64 groups in a row failed, the last: no" in failure
    invariants.check(world.scheduler.state)


def test_a_silent_nodes_work_is_freed_and_goes_on_when_it_is_heard_again() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec(num_steps=20)])
    world.run_until(lambda: len(running(world)) == 9)
    world.silence(20.0)
    world.run_until(lambda: not world.scheduler.state.nodes["node"].up)
    status = pipeline_status(world.scheduler.state, pipeline_of(world))
    assert any("p.trainer0 or its node node to be heard again" in w for w in status.waiting_for)
    world.run()
    assert pipeline_of(world).stage == "finished"
    invariants.check(world.scheduler.state)


def test_a_trainer_back_at_an_older_version_trains_its_recorded_cut_again() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec(num_steps=4)])
    world.checkpoint_every = 100
    world.run_until(lambda: pipeline_of(world).version == 2)
    world.kill(world.processes["p.trainer0"])
    world.run()
    cuts = issued(world, c.BatchCut)
    first, again = [[g.group for g in x.groups] for x in cuts if x.version == 0]
    assert first == again
    assert [x.incarnation for x in cuts if x.version == 0] == [0, 1]
    status = pipeline_status(world.scheduler.state, pipeline_of(world))
    assert status.incarnation == 1
    assert status.groups.trained == 12
    assert status.groups.discarded >= 3
    cursors = [o.cursor for make in issued(world, c.MakeGroups) for o in make.orders]
    assert set(cursors) == set(range(12))  # Discarded prompts came back; none was skipped.
    invariants.check(world.scheduler.state)


def test_a_step_that_an_earlier_boot_trained_and_did_not_announce_counts_once(
    world: World,
) -> None:
    world.run_until(lambda: pipeline_of(world).version == 1)
    world.run_until(lambda: getattr(pipeline_of(world).open_cut, "sent_gang", None) is not None)
    world.checkpoints["p"] = 2  # committed, and dies before it announces
    world.kill(world.processes["p.trainer0"])
    world.run_until(lambda: pipeline_of(world).version == 2)
    assert pipeline_of(world).num_trained_tokens == 200
    assert pipeline_of(world).metrics == {"loss": 1.0}
    world.kill(world.processes["p.trainer0"])  # and announces it again
    world.run()
    assert pipeline_of(world).num_trained_tokens == 300


def test_a_trainer_from_another_run_folder_fails_the_pipeline(world: World) -> None:
    world.run_until(lambda: pipeline_of(world).version == 1)
    world.checkpoints["p"] = 7
    world.kill(world.processes["p.trainer0"])
    world.run()
    assert "use another run folder" in (pipeline_of(world).failure or "")


def test_a_member_started_by_hand_gets_work(world: World) -> None:
    world.run_until(lambda: pipeline_of(world).version == 0)
    order = c.StartTenant(
        id="x",
        leader_epoch=1,
        worker=Worker(id="node", boot="n1"),
        tenant="p.rollout-hand",
        role="rollout",
        pipeline="p",
        device=None,
    )
    world.spawn_by_hand(order)
    world.run()
    owners = {place.worker.id for place in issued(world, c.PlaceSequences)}
    assert "p.rollout-hand" in owners


def test_a_frozen_rollout_worker_loses_its_sequences_and_drops_them_when_it_comes_back() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec()])
    world.run_until(lambda: len(running(world)) > 3)
    process = world.processes["p.rollout0"]
    process.frozen = True
    owned = set(process.held)
    assert owned
    start_s = world.now_s
    world.run_until(lambda: pipeline_of(world).tenants["p.rollout0"].lost)
    assert 20 < world.now_s - start_s < 40
    placed = [x for x in issued(world, c.PlaceSequences) if x.worker.id == "p.rollout1"]
    assert owned <= {p.sequence for x in placed for p in x.placements}
    process.frozen = False
    process.held |= dict.fromkeys(owned, 1)  # it never finished them
    world.run_until(lambda: not pipeline_of(world).tenants["p.rollout0"].lost)
    world.run_until(lambda: not process.held)
    world.run()
    assert pipeline_of(world).stage == "finished"
    invariants.check(world.scheduler.state)


def test_an_evaluation_worker_that_is_gone_without_a_word_loses_its_evaluation() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec()])
    world.run_until(lambda: pipeline_of(world).stage == "running")
    ghost = Worker(id="p.evaluation9", boot="ghost")
    world.publish(
        e.WorkerStarted(
            id="g1", pipeline="p", worker=ghost, role="evaluation", node=None, device=None
        )
    )
    world.publish(e.WorkerReady(id="g2", pipeline="p", worker=ghost, role="evaluation"))
    world.kill(world.processes["p.evaluation0"])  # the next attempt goes to the ghost
    world.run()
    assert pipeline_of(world).stage == "finished"
    assert [r.version for r in pipeline_of(world).evaluations][-1] == 3


def test_first_and_last_evaluations_are_never_skipped_and_others_are_counted() -> None:
    often = spec(num_steps=6, evaluation=EvaluationSpec(every=1))
    world = World(seed=1, faults=KIND, pipelines=[often])
    world.run()
    pipeline = pipeline_of(world)
    versions = [result.version for result in pipeline.evaluations]
    assert (versions[0], versions[-1]) == (0, 6)
    assert pipeline.evaluations_skipped
    assert sorted(versions + pipeline.evaluations_skipped) == list(range(7))
    for cut in issued(world, c.BatchCut):
        assert (cut.incarnation, cut.version) in cut.retain_versions


def test_data_is_needed_until_a_checkpoint_covers_it(world: World) -> None:
    world.checkpoint_every = 2
    floors = []
    for version in range(1, 4):
        world.run_until(lambda version=version: (pipeline_of(world).version or 0) >= version)
        floors.append(data_needed_from(pipeline_of(world)))
    assert floors[0] == 1  # Nothing covered yet.
    world.run()
    assert data_needed_from(pipeline_of(world)) == pipeline_of(world).data_sequence + 1
