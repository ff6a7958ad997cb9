"""What a scheduler tells Prometheus: counted, read from its state, asked of NATS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from jigsawrl import metrics
from jigsawrl.bus.base import StoredEvent
from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.contract import events
from jigsawrl.contract.message import Ref, Worker
from jigsawrl.contract.parts import SequenceFinish, SubStage
from jigsawrl.core import invariants
from jigsawrl.core.introduction import Introduction
from jigsawrl.core.state import Node, State, Tenant, new_pipeline
from jigsawrl.core.status import pipeline_status
from loadgen.bench.cluster import Cluster
from loadgen.bench.scheduler import specs
from services.exposition import Families, Histogram, serve_metrics
from services.scheduler.leader import DeposedError, Leader
from services.scheduler.meter import Meter
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.pipeline_metrics import add_cluster, add_pipeline
from services.scheduler.watching import is_ignored
from tests.services.scheduler_steps import config, start_node, status, submit, until_true
from tests.services.scrape import Scraped, scrape
from tests.unit.core.world import spec

WORKER = Worker(id="p.rollout0", boot="b")


def told(families: Families) -> Scraped:
    class One:
        def collect(self) -> Families:
            return families

    registry = CollectorRegistry()
    registry.register(One())  # type: ignore[arg-type]
    return Scraped(generate_latest(registry).decode())


def counted(*folded: events.Event, clock_s: float = 11.0, ignored: bool = False) -> Meter:
    meter = Meter(clock=lambda: clock_s)
    for sequence, event in enumerate(folded, 1):
        stored = StoredEvent(sequence=sequence, timestamp_s=10.0, event=event, payload=b"")
        decided = isinstance(event, events.Tick)
        meter.folded(stored, [], taken_s=0.0003, decided=decided, ignored=ignored)
    return meter


def test_what_the_core_ignored_is_folded_and_counts_for_nothing() -> None:
    event = ended("bulk_decode", duration_s=1.0, num_iterations=10)
    assert is_ignored(event, num_ignored=1)
    assert not is_ignored(event, num_ignored=0)
    taken, ignored = Families(), Families()
    counted(event).add_to(taken)
    counted(event, ignored=True).add_to(ignored)
    told = [str(list(families)) for families in (taken, ignored)]
    assert ["bulk_decode" in text for text in told] == [True, False]
    assert all(events.SubStagesEnded.tag() in text for text in told)


def ended(kind: str, *, duration_s: float, num_iterations: int) -> events.SubStagesEnded:
    span = SubStage(
        kind=kind,  # type: ignore[arg-type]
        version=0,
        started_s=0.0,
        ended_s=1.0,
        duration_s=duration_s,
        num_iterations=num_iterations,
        num_tokens=0,
    )
    return events.SubStagesEnded(id="s", pipeline="p", worker=WORKER, spans=(span,))


def test_a_histogram_counts_what_is_at_its_bounds_below_them() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.add(1.0)
    histogram.add(1.5, 3)
    histogram.add(9.0)
    assert histogram.cumulative() == [("1.0", 1.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 14.5


def test_folds_and_decisions_are_counted_apart() -> None:
    families = Families()
    counted(events.Tick(id="t"), events.Heartbeat(id="h", node=WORKER)).add_to(families)
    found = told(families)
    assert found.value(metrics.EVENTS_FOLDED, event="tick") == 1
    assert found.value(metrics.DECISION_SECONDS, part="_count") == 1
    assert found.value(metrics.FOLD_SECONDS, part="_count") == 1
    assert found.value(metrics.FOLD_SECONDS, part="_bucket", le="0.0005") == 1
    assert found.value(metrics.FOLD_SECONDS, part="_bucket", le="0.0002") == 0
    assert found.value(metrics.FOLD_LAG_SECONDS) == 1.0


def test_each_iteration_of_a_sub_stage_counts_with_the_mean_of_its_span() -> None:
    families = Families()
    counted(ended("bulk_decode", duration_s=0.4, num_iterations=20)).add_to(families)
    of = {"pipeline": "p", "kind": "bulk_decode"}
    found = told(families)
    assert found.value(metrics.SUBSTAGE_SECONDS, part="_count", **of) == 20
    assert found.value(metrics.SUBSTAGE_SECONDS, part="_sum", **of) == pytest.approx(0.4)
    assert found.value(metrics.SUBSTAGE_SECONDS, part="_bucket", le="0.03", **of) == 20
    assert found.value(metrics.SUBSTAGE_SECONDS, part="_bucket", le="0.01", **of) == 0


def test_what_passes_is_counted_by_pipeline_and_forgotten_with_it() -> None:
    finish = SequenceFinish(
        sequence="p/g0/s0",
        epoch=1,
        ref=Ref("s", 1),
        finish_reason="stop",
        num_tokens=7,
        min_version=0,
        max_version=0,
    )
    finished = events.SequencesFinished(
        id="f", pipeline="p", worker=WORKER, finished=(finish, finish)
    )
    exited = events.WorkerExited(id="x", pipeline="p", worker=WORKER, exit_code=1, reason="")
    committed = events.CheckpointCommitted(
        id="c", pipeline="p", worker=WORKER, gang_epoch=1, incarnation=0, version=1, path=""
    )
    meter = counted(finished, exited, committed, ended("prefill", duration_s=1, num_iterations=1))
    families = Families()
    meter.add_to(families)
    found = told(families)
    assert found.value(metrics.GENERATED_TOKENS, pipeline="p") == 14
    assert found.value(metrics.WORKER_EXITS, pipeline="p", role="rollout") == 1
    assert found.value(metrics.CHECKPOINT_TIME, pipeline="p") == 11.0
    other = new_pipeline(spec("other"), b"", gang_epoch=0)
    other.tenants["other.trainer0"] = Tenant(
        id="other.trainer0", role="trainer", node=None, device=None
    )
    meter.keep_to([other])
    after = Families()
    meter.add_to(after)
    rest = told(after)
    for metric in (metrics.GENERATED_TOKENS, metrics.WORKER_EXITS, metrics.CHECKPOINT_TIME):
        assert metric.name in found.names()
        assert rest.sum(metric, pipeline="p") == 0
    assert metrics.SUBSTAGE_SECONDS.name not in rest.names()
    assert rest.value(metrics.WORKER_EXITS, pipeline="other", role="trainer") == 0
    assert rest.value(metrics.GENERATED_TOKENS, pipeline="other") == 0


def test_the_state_is_told_as_status_tells_it() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=4, specs=specs(4, 2), policy="jigsaw")
    state = cluster.scheduler.state
    cluster.run(lambda: all((p.version or 0) >= 2 for p in state.pipelines.values()))
    families = Families()
    add_cluster(families, state)
    for pipeline in state.pipelines.values():
        add_pipeline(families, pipeline)
    found = told(families)
    assert found.value(metrics.NODE_UP, node="n0") == 1
    for pipeline in state.pipelines.values():
        name, shown = pipeline.name, pipeline_status(state, pipeline)
        assert found.value(metrics.PIPELINE_VERSION, pipeline=name) == shown.version >= 2
        assert found.value(metrics.PIPELINE_STATE, pipeline=name, state="running") == 1
        assert found.sum(metrics.PIPELINE_STATE, pipeline=name) == 1
        assert found.sum(metrics.GROUPS, pipeline=name) + found.sum(
            metrics.GROUPS_IN_FLIGHT, pipeline=name
        ) == found.sum(metrics.GROUPS_ADMITTED, pipeline=name)
        assert found.sum(metrics.SEQUENCES_IN_FLIGHT, pipeline=name) == shown.sequences.in_flight
        assert found.value(metrics.TRAINED_TOKENS, pipeline=name) == shown.num_trained_tokens > 0
        for worker in shown.workers:
            of = {"pipeline": name, "role": worker.role, "worker": worker.worker}
            of |= {"device": worker.device or ""}
            assert found.value(metrics.WORKER_HELD, **of) == worker.num_held
            assert found.value(metrics.SHARE_APPLIED, **of) == worker.share
    invariants.check(state)


async def test_a_leader_is_scraped_and_a_deposed_one_tells_only_that(
    bus: NatsBus, tmp_path: Path
) -> None:
    watch = SchedulerMetrics(bus, host="s", folder=tmp_path)
    leader = Leader(bus, holder="s", folder=tmp_path, watches=[watch])
    async with serve_metrics(("127.0.0.1", 0), watch.gather) as url:
        assert url is not None
        assert (await scrape(url)).value(metrics.LEADS) == 0
        task = asyncio.ensure_future(leader.lead())
        await start_node(bus)
        assert await submit(bus, config()) is None
        asked = await status(bus)
        found = await scrape(url)
        assert found.value(metrics.LEADS) == 1
        assert found.value(metrics.LEADER_EPOCH) == asked.leader_epoch
        assert found.value(metrics.PIPELINE_STATE, pipeline="p", state="starting") == 1
        assert found.sum(metrics.COMMANDS_ISSUED, command="start_tenant") == 4
        stream = bus.subjects.data_stream("p").name
        limit = found.value(metrics.STREAM_LIMIT, stream=stream)
        assert limit == (await bus.fill(stream)).max_bytes
        lag = found.value(metrics.FOLD_LAG)
        assert lag is not None
        assert lag < 100
        assert found.value(metrics.DEAD_LETTERS) == 0
        of = {"pipeline": "", "role": "scheduler", "worker": "s"}
        assert found.value(metrics.NATS_RECONNECTS, **of) == 0
        free = found.value(metrics.DISK_FREE, place="scheduler")
        assert free is not None
        assert free > 0
        await bus.publish_event(events.LeaderElected(id="o", leader="o", code_version="1"))
        with contextlib.suppress(DeposedError):
            await asyncio.wait_for(task, 10)
        after = await scrape(url)
        assert after.value(metrics.LEADS) == 0
        assert metrics.PIPELINE_STATE.name not in after.names()


async def test_without_nats_the_rest_is_told(
    own_server: EmbeddedServer, own_bus: NatsBus, tmp_path: Path
) -> None:
    watch = SchedulerMetrics(own_bus, host="s", folder=tmp_path)
    leader = Leader(own_bus, holder="s", folder=tmp_path, watches=[watch])
    task = asyncio.ensure_future(leader.lead())
    try:
        await submit(own_bus, config())
        own_server.stop()

        async def told_without_streams() -> bool:
            families = await watch.gather()
            names = told(families).names()
            assert metrics.PIPELINE_STATE.name in names
            return metrics.STREAM_BYTES.name not in names

        await until_true(told_without_streams)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_port_that_is_taken_costs_the_metrics_and_nothing_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def nothing() -> Families:
        return Families()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with serve_metrics(taken.getsockname(), nothing) as url:
            assert url is None


async def test_a_loop_that_fails_to_gather_is_a_target_that_is_down() -> None:
    async def broken() -> Families:
        raise ValueError("no")

    async with serve_metrics(("127.0.0.1", 0), broken) as url:
        assert url is not None
        with pytest.raises(OSError, match="500"):
            await scrape(url)


def test_a_node_that_left_is_not_told_as_one_that_was_lost() -> None:
    state = State()
    for name in ("left", "lost"):
        state.nodes[name] = Node(id=name, boot="b", devices=[], seen_s=0.0, up=False)
        state.introductions[name] = Introduction(
            boot="b", schema=1, code_version="1", left=name == "left"
        )
    families = Families()
    add_cluster(families, state)
    found = told(families)
    assert found.value(metrics.NODE_UP, node="lost") == 0
    assert found.value(metrics.NODE_UP, node="left") is None
