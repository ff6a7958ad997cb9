"""Nodes and workers of other versions, and clocks that are off."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract.codec import EVENTS, UndecodableError, encode
from jigsawrl.contract.message import Worker
from jigsawrl.contract.requests import NodeStatus
from jigsawrl.contract.spec import Device
from jigsawrl.core import invariants, nodes
from jigsawrl.core.scheduler import Scheduler
from jigsawrl.core.status import node_statuses
from tests.unit.core.world import spec

PLACED = "p.trainer0"


class Stream:
    """An event stream and who folds it."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.commands: list[c.Command] = []
        self.now_s = 1000.0
        self._numbers = itertools.count(1)
        self.lead(schema=1)

    def publish(self, event: e.Event, *, after_s: float = 0.1) -> None:
        self.now_s += after_s
        number = next(self._numbers)
        self.commands += self.scheduler.handle(event, timestamp_s=self.now_s, sequence=number)

    def lead(self, *, schema: int) -> None:
        self.publish(e.LeaderElected(id=f"l{schema}", leader="s", code_version="1", schema=schema))

    def start(
        self, name: str, *, schema: int, boot: str = "b1", clock_s: float | None = None
    ) -> None:
        self.publish(
            e.NodeStarted(
                id=f"{name}:{boot}",
                schema=schema,
                node=Worker(id=name, boot=boot),
                devices=tuple(Device(name, i, "cpu", 1 << 34) for i in range(2)),
                code_version=f"0.{schema}",
                clock_s=clock_s,
            )
        )

    def beat(self, name: str, *, schema: int = 1, clock_s: float | None = None) -> None:
        node = Worker(id=name, boot="b1")
        self.publish(e.Heartbeat(id="h", schema=schema, node=node, clock_s=clock_s))

    def submit(self) -> None:
        self.publish(
            e.PipelineSubmitted(id="submit:p", pipeline="p", spec=spec(), config=b"config")
        )
        self.publish(e.Tick(id="t"))

    def worker(self, name: str, *, schema: int) -> None:
        self.publish(
            e.WorkerStarted(
                id=name,
                schema=schema,
                pipeline="p",
                worker=Worker(id=name, boot="b"),
                role="trainer" if name == PLACED else "rollout",
                node="n",
                device=None,
                code_version="0.9",
            )
        )

    def nodes(self) -> dict[str, NodeStatus]:
        return {node.node: node for node in node_statuses(self.scheduler.state)}


@pytest.fixture
def stream() -> Iterator[Stream]:
    """Led by a scheduler of schema 1."""
    made = Stream()
    yield made
    invariants.check(made.scheduler.state)
    again = Scheduler.restore(made.scheduler.snapshot())
    assert again.snapshot() == made.scheduler.snapshot()


@pytest.mark.parametrize("schema", [0, 1, 2])
def test_a_node_one_schema_apart_gets_work(stream: Stream, schema: int) -> None:
    stream.start("n", schema=schema)
    stream.submit()
    assert {x.tenant for x in stream.commands if isinstance(x, c.StartTenant)} > {PLACED}
    told = stream.nodes()["n"]
    assert (told.state, told.schema_version, told.code_version) == ("up", schema, f"0.{schema}")


@pytest.mark.parametrize(("schema", "late"), [(-1, "n"), (3, "the scheduler")])
def test_a_node_further_apart_is_refused_by_name_and_others_get_the_work(
    stream: Stream, schema: int, late: str
) -> None:
    stream.start("n", schema=schema)
    stream.start("other", schema=1)
    stream.beat("n", schema=schema)
    stream.submit()
    started = [x for x in stream.commands if isinstance(x, c.StartTenant)]
    assert {x.worker.id for x in started} == {"other"}
    told = stream.nodes()
    assert told["other"].state == "up"
    assert (told["n"].state, told["n"].devices) == ("refused", ())
    assert told["n"].refused == (
        f"n speaks schema {schema} and the scheduler 1, more than 1 apart: upgrade {late}, one"
        " schema at a time"
    )


def test_a_refused_node_that_is_upgraded_and_started_again_gets_work(stream: Stream) -> None:
    stream.start("n", schema=3)
    stream.start("n", schema=2, boot="b2")
    assert stream.nodes()["n"].state == "up"
    stream.start("n", schema=2, boot="b2")  # a repeat
    assert stream.nodes()["n"].refused is None


def test_a_leader_of_another_schema_refuses_who_is_now_too_far(stream: Stream) -> None:
    stream.start("old", schema=0)
    stream.start("new", schema=2)
    stream.submit()
    stream.lead(schema=2)
    told = stream.nodes()
    assert {name: node.state for name, node in told.items()} == {"old": "refused", "new": "up"}
    assert not stream.scheduler.state.nodes["old"].up
    stream.beat("old", schema=0)
    assert not stream.scheduler.state.nodes["old"].up
    stream.lead(schema=1)
    assert stream.nodes()["old"].refused == (
        "old was refused by an earlier scheduler: start it again"
    )


def test_a_worker_further_apart_fails_its_pipeline_by_name(stream: Stream) -> None:
    stream.start("n", schema=1)
    stream.submit()
    stream.worker("p.rollout-by-hand", schema=3)
    pipeline = stream.scheduler.state.pipelines["p"]
    assert (pipeline.stage, stream.scheduler.state.num_ignored) == ("starting", 1)
    stream.worker(PLACED, schema=3)
    assert pipeline.stage == "failed"
    assert (pipeline.failure or "").startswith("p.trainer0 speaks schema 3 and the scheduler 1")


def test_a_worker_one_schema_apart_is_configured(stream: Stream) -> None:
    stream.start("n", schema=1)
    stream.submit()
    stream.worker(PLACED, schema=2)
    stream.publish(e.Tick(id="t2"))
    assert [x.worker.id for x in stream.commands if isinstance(x, c.Configure)] == [PLACED]
    assert stream.scheduler.state.pipelines["p"].tenants[PLACED].code_version == "0.9"


def test_the_clock_of_a_node_is_held_against_the_servers(stream: Stream) -> None:
    stream.start("n", schema=1, clock_s=stream.now_s + 5)
    assert stream.nodes()["n"].clock_skew_s == pytest.approx(4.9)
    for _ in range(2):
        stream.beat("n", clock_s=stream.now_s + 0.1)
    assert stream.nodes()["n"].clock_skew_s == pytest.approx(0.0)
    stream.beat("n", clock_s=float("nan"))
    stream.beat("n")
    assert stream.nodes()["n"].clock_skew_s == pytest.approx(0.0)


def test_a_message_that_waited_out_an_outage_makes_no_clock_late(stream: Stream) -> None:
    stream.start("n", schema=1, clock_s=stream.now_s + 0.1)
    stream.beat("n", clock_s=stream.now_s - 6)
    assert stream.nodes()["n"].clock_skew_s == pytest.approx(0.0)
    stream.beat("n", clock_s=stream.now_s + 0.1)
    assert stream.nodes()["n"].clock_skew_s == pytest.approx(0.0)
    for _ in range(2):
        stream.beat("n", clock_s=stream.now_s - 6)
    assert stream.nodes()["n"].clock_skew_s == pytest.approx(-6.1)


def test_a_node_that_says_nothing_of_its_clock_and_one_that_left_are_told_so(
    stream: Stream,
) -> None:
    stream.start("n", schema=1)
    assert stream.nodes()["n"].clock_skew_s is None
    stream.publish(e.NodeStopped(id="s", node=Worker(id="n", boot="b1"), reason="told to stop"))
    assert stream.nodes()["n"].state == "left"


def test_introductions_are_read_whatever_their_schema_is_and_other_messages_are_not() -> None:
    node = Worker(id="n", boot="b")
    for event in (
        e.NodeStarted(id="i", schema=99, node=node, devices=()),
        e.Heartbeat(id="i", schema=99, node=node),
        e.NodeStopped(id="i", schema=99, node=node, reason=""),
        e.LeaderElected(id="i", schema=99, leader="s", code_version="9"),
    ):
        assert EVENTS.decode(encode(event)) == event
    assert EVENTS.decode(encode(e.Tick(id="i", schema=2))).schema == 2
    with pytest.raises(UndecodableError, match="has schema 3; this program reads up to 2"):
        EVENTS.decode(encode(e.Tick(id="i", schema=3)))


def test_a_node_that_left_or_is_silent_is_forgotten_a_day_later(stream: Stream) -> None:
    for name in ("left", "silent", "n"):
        stream.start(name, schema=1)
    stream.publish(e.NodeStopped(id="s", node=Worker(id="left", boot="b1"), reason="told to"))
    state = stream.scheduler.state
    state.clock.now_s += nodes.SILENCE_S
    stream.beat("n")
    stream.publish(e.Tick(id="t"))
    assert {name: node.state for name, node in stream.nodes().items()} == {
        "left": "left",
        "silent": "away",
        "n": "up",
    }
    state.clock.now_s += nodes.FORGET_S
    stream.beat("n")
    stream.publish(e.Tick(id="t"))
    assert set(stream.nodes()) == {"n"}
    stream.start("silent", schema=1, boot="b2")
    assert stream.nodes()["silent"].state == "up"


def test_a_silent_node_is_known_while_a_pipeline_counts_on_it(stream: Stream) -> None:
    stream.start("n", schema=1)
    stream.submit()
    stream.scheduler.state.clock.now_s += nodes.FORGET_S
    stream.publish(e.Tick(id="t"))
    stream.publish(e.Tick(id="t"))
    assert stream.nodes()["n"].state == "away"
