"""What a decision looks at: the devices on which something changed, and a bounded number around."""

from __future__ import annotations

from jigsawrl.contract.message import Worker
from jigsawrl.core import horizon, invariants, phases, tally
from jigsawrl.core.group import Sequence
from jigsawrl.core.policies.jigsaw import MAX_HOLD_S
from jigsawrl.core.prediction import Outlook, predict
from jigsawrl.core.state import new_pipeline
from jigsawrl.core.work_history import Observation, WorkHistory, close, observe
from loadgen.bench.cluster import Cluster
from loadgen.bench.scheduler import Measured, exponent, percentile, row, specs
from tests.unit.core.graphs import CPU
from tests.unit.core.world import spec

NUM_WORKERS = 12


def cluster() -> Cluster:
    """Sixteen devices, four pipelines, all under way and looked at."""
    made = Cluster(num_nodes=1, devices_per_node=16, specs=specs(16, 4), policy="jigsaw")
    pipelines = made.scheduler.state.pipelines.values()
    made.run(lambda: all((p.version or 0) >= 3 for p in pipelines))
    return made


def test_a_decision_takes_no_more_devices_than_its_bound_and_the_rest_stays_due() -> None:
    state = cluster().scheduler.state
    devices = {f"n0/cpu{i}": True for i in range(16)}
    state.outlooks.due = dict(devices)
    first = horizon.take(state, devices=devices)
    assert first == list(devices)[: horizon.MAX_DEVICES]
    assert list(state.outlooks.due) == list(devices)[horizon.MAX_DEVICES :]
    state.outlooks.due = {"n0/cpu5": True}
    chosen = horizon.take(state, devices=devices)
    assert (chosen[0], len(chosen)) == ("n0/cpu5", horizon.MAX_DEVICES)
    here = {name.partition(".")[0] for name in state.residents["n0/cpu5"]}
    assert all(here & {n.partition(".")[0] for n in state.residents[d]} for d in chosen)
    assert not state.outlooks.due
    assert horizon.take(state, devices=devices) == []


def test_a_device_is_due_when_what_a_tenant_does_has_changed_and_not_before() -> None:
    state = cluster().scheduler.state
    horizon.notice(state, max_hold_s=MAX_HOLD_S)
    state.outlooks.due, state.outlooks.held_since_s = {}, {}
    horizon.notice(state, max_hold_s=MAX_HOLD_S)
    assert not state.outlooks.due
    pipeline = next(p for p in state.pipelines.values() if p.num_generating)
    sequence = next(
        s for g in pipeline.groups.values() for s in g.sequences if s.stage == "running"
    )
    assert sequence.owner is not None
    worker = pipeline.tenants[sequence.owner.id]
    before = phases.kind_of(pipeline, worker)
    while phases.kind_of(pipeline, worker) == before:
        assert not pipeline.turned
        sequence = next(
            s
            for g in pipeline.groups.values()
            for s in g.sequences
            if s.owner == worker.worker and s.stage == "running"
        )
        tally.leave(pipeline, sequence)
        sequence.stage, sequence.owner = "scored", None
    horizon.notice(state, max_hold_s=MAX_HOLD_S)
    assert list(state.outlooks.due) == [worker.device]


def history() -> WorkHistory:
    """One step of many rollout workers, each on a device of its own and slower than the one before."""
    made = WorkHistory()
    for number in range(NUM_WORKERS):
        for kind, tenant in (("bulk_decode", f"p.rollout{number}"), ("optimizer", f"p.t{number}")):
            observation = Observation(
                pipeline="p",
                version=0,
                tenant=tenant,
                device=f"d{number}",
                kind=kind,  # type: ignore[arg-type]
                duration_s=1.0 + number,
                num_iterations=1,
                num_tokens=1,
                share=1.0,
            )
            observe(made, observation, table=CPU)
    close(made, version=0)
    return made


def test_what_others_do_elsewhere_is_one_wait_as_long_as_the_longest_of_them() -> None:
    outlook = Outlook(pipeline="p", version=1, num_steps=1, devices=frozenset({"d0", "d11"}))
    nodes = {node.id: node for node in predict(history(), outlook)}
    assert {node.device for node in nodes.values()} == {None, "d0", "d11"}
    assert nodes["p/v1/elsewhere/rollout"].work_s == 11.0
    assert nodes["p/v1/elsewhere/optimizer"].work_s == 11.0
    assert "p/v1/elsewhere/rollout" in nodes["p/v1/p.t0/optimizer"].after


def test_edges_grow_with_the_workers_and_not_with_their_square() -> None:
    nodes = predict(history(), Outlook(pipeline="p", version=1, num_steps=1))
    assert sum(len(node.after) for node in nodes) <= 4 * NUM_WORKERS


def test_counts_follow_a_sequence_and_tell_when_a_worker_turns_to_its_tail() -> None:
    pipeline = new_pipeline(spec(), b"", gang_epoch=0)
    one = Sequence(index=0, stage="running", owner=Worker(id="p.rollout0", boot="b"))
    turns = []
    for change in [tally.enter] * 10 + [tally.leave] * 10:
        change(pipeline, one)
        turns.append(bool(pipeline.turned))
        pipeline.turned = {}
    assert [at for at, turned in enumerate(turns) if turned] == [0, 8, 11, 19]
    assert pipeline.num_generating == {}


def test_the_benchmark_measures_decisions_that_search() -> None:
    made = cluster()
    measured = Measured(made)
    made.watch = measured
    made.run(lambda: len(measured.decisions_s) >= 5)
    assert all(num > 1 for num in measured.num_candidates)
    assert all(num > 0 for num in measured.num_expanded)
    small, large = row(8, 2, measured), row(64, 4, measured)
    assert exponent([small, large]) == 0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    invariants.check(made.scheduler.state)
