"""A cluster: its NATS server and streams, its scheduler, its nodes and workers.

One client that asks and goes; nothing is published.
"""

from __future__ import annotations

from collections.abc import Iterator

from jigsawrl import __version__
from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import NatsBus, connect
from jigsawrl.bus.credentials import read_credentials
from jigsawrl.bus.facts import ServerFacts, StreamFacts, server_facts
from jigsawrl.bus.server import OLDEST_VERSION
from jigsawrl.cli.checks.finding import Finding, failed, ok, warning
from jigsawrl.cli.cluster import CONNECT_TIMEOUT_S, Address, Cluster
from jigsawrl.clocks import skew_text
from jigsawrl.contract.message import MAX_SCHEMAS_APART, SCHEMA_VERSION, Ref
from jigsawrl.contract.requests import NodeStatus, Status
from jigsawrl.contract.streams import MAX_PAYLOAD_BYTES, NEARLY_FULL

LATE_HEARTBEAT_S = 5.0
"""A node is heard every 2 s; two that are missing are none of the usual delays."""


async def check_cluster(address: Address) -> list[Finding]:
    """All of it; what nobody answers ends it."""
    url, path = address
    try:
        bus = await connect(
            url,
            name="jigsaw-doctor",
            timeout_s=CONNECT_TIMEOUT_S,
            credentials=None if path is None else read_credentials(path, "client"),
        )
    except BusError as error:
        found, _, remedy = str(error).partition(": ")
        return [failed("nats", found, remedy=remedy or "see the server's log")]
    try:
        return await _check(bus, url)
    except BusError as error:
        return [failed("nats", str(error), remedy="see the server's log, and ask again")]
    finally:
        await bus.close()


async def _check(bus: NatsBus, url: str) -> list[Finding]:
    facts = await server_facts(bus.connection, bus.subjects)
    findings = [*check_server(facts, url)]
    if facts.without_jetstream is not None:
        return findings
    findings += check_streams(facts.streams, [s.name for s in bus.subjects.cluster_streams()])
    findings.append(await _check_dead_letters(bus))
    try:
        status = await Cluster(bus).status()
    except BusError as error:
        remedy = "see its log (jigsaw logs scheduler), or start one"
        return [*findings, failed("scheduler", str(error), remedy=remedy)]
    return [*findings, *check_status(status)]


def check_server(facts: ServerFacts, url: str) -> Iterator[Finding]:
    """Version, limits, JetStream, clock."""
    oldest = ".".join(map(str, OLDEST_VERSION))
    if [int(part) for part in facts.version.split(".")[:2]] < list(OLDEST_VERSION):
        yield failed(
            "nats",
            f"the server at {url} is of version {facts.version}",
            remedy=f"run nats-server {oldest} or newer there",
        )
    else:
        yield ok("nats", f"nats-server {facts.version} answers at {url}")
    if facts.max_payload_bytes < MAX_PAYLOAD_BYTES:
        yield failed(
            "max_payload",
            f"the server takes messages of {facts.max_payload_bytes} bytes at most",
            remedy=f"set max_payload: {MAX_PAYLOAD_BYTES} in its configuration, and restart it",
        )
    else:
        yield ok("max_payload", f"{facts.max_payload_bytes} bytes")
    if facts.without_jetstream is not None:
        yield failed(
            "jetstream",
            f"JetStream does not answer: {facts.without_jetstream}",
            remedy="give the server a jetstream block with a store_dir, and this account a share of it",
        )
        return
    yield _check_store(facts)
    skew = skew_text("this machine", facts.clock_skew_s)
    if skew is not None:
        found, _, remedy = skew.rpartition("; ")
        yield warning("clock", found, remedy=remedy)
    elif facts.clock_skew_s is not None:
        yield ok("clock", f"{abs(facts.clock_skew_s):.3f} s from the server's")


def _check_store(facts: ServerFacts) -> Finding:
    if facts.max_bytes is None:
        return ok("jetstream", f"{facts.num_bytes} bytes stored")
    found = f"{facts.num_bytes} of {facts.max_bytes} bytes stored"
    if facts.num_bytes > NEARLY_FULL * facts.max_bytes:
        return warning(
            "jetstream", found, remedy="free disk space, or delete what pipelines have left behind"
        )
    return ok("jetstream", found)


def check_streams(streams: tuple[StreamFacts, ...], expected: list[str]) -> Iterator[Finding]:
    """Those of the cluster are there, and none loses what it holds or is nearly full."""
    names = {stream.name for stream in streams}
    missing = [name for name in expected if name not in names]
    if missing:
        yield failed(
            "streams",
            f"missing: {', '.join(missing)}",
            remedy="start a scheduler: it makes them; if one runs, its log says what keeps it",
        )
    for stream in streams:
        if not stream.refuses_when_full:
            yield failed(
                "streams",
                f"{stream.name} drops its oldest messages when it is full",
                remedy=f"nats stream edit {stream.name} --discard new",
            )
        elif stream.max_bytes and stream.num_bytes > NEARLY_FULL * stream.max_bytes:
            yield warning(
                "streams",
                f"{stream.name} holds {stream.num_bytes} of {stream.max_bytes} bytes",
                remedy="see in jigsaw status who waits for room in it",
            )
    if streams and not missing:
        fullest = max(streams, key=_fill)
        yield ok(
            "streams", f"{len(streams)}; the fullest is {fullest.name}, {_fill(fullest):.1%} full"
        )


def _fill(stream: StreamFacts) -> float:
    return stream.num_bytes / stream.max_bytes if stream.max_bytes else 0.0


async def _check_dead_letters(bus: NatsBus) -> Finding:
    """The last one says most."""
    fill = await bus.fill(bus.subjects.dead_letters_stream().name)
    if not fill.num_messages:
        return ok("dead letters", "none")
    try:
        last = (await bus.load(Ref(fill.stream, fill.last_sequence))).reason
    except BusError as error:
        last = str(error)
    return warning(
        "dead letters",
        f"{fill.num_messages}, the last: {last}",
        remedy="find who publishes such messages: a program of another version, most likely",
    )


def check_status(status: Status) -> Iterator[Finding]:
    """Who leads, and who works for it."""
    led_by = status.code_version or "a version that does not tell"
    found = f"{status.leader} leads, policy {status.policy or 'unknown'}, version {led_by}"
    if abs(status.schema - SCHEMA_VERSION) > MAX_SCHEMAS_APART:
        yield failed(
            "scheduler",
            f"{found}, schema {status.schema}; this command speaks {SCHEMA_VERSION}",
            remedy="use the command of the cluster's version",
        )
    elif status.code_version != __version__:
        yield warning(
            "scheduler",
            f"{found}; this command is of {__version__}",
            remedy="upgrade the older one when it suits",
        )
    else:
        yield ok("scheduler", found)
    yield from _check_nodes(status)
    yield _check_workers(status)


def _check_nodes(status: Status) -> Iterator[Finding]:
    if not any(node.state == "up" for node in status.nodes):
        yield warning(
            "nodes", "none is up: no pipeline can run", remedy="start one, or see why it ended"
        )
    for node in status.nodes:
        yield _check_node(node, led_by=status.code_version)
        skew = skew_text(node.node, node.clock_skew_s)
        if skew is not None and node.state == "up":
            found, _, remedy = skew.rpartition("; ")
            yield warning("clock", found, remedy=remedy)


def _check_node(node: NodeStatus, *, led_by: str) -> Finding:
    version = node.code_version or "unknown"
    found = (
        f"{node.node}: {node.state}, {len(node.devices)} devices, version {version}, heard"
        f" {node.silent_s:.1f} s ago"
    )
    if node.refused is not None:
        reason, _, remedy = node.refused.rpartition(": ")
        return failed("nodes", f"{node.node} gets no work: {reason}", remedy=remedy)
    if node.state == "left":
        return ok("nodes", f"{node.node}: left on purpose")
    if node.state == "away" or node.silent_s > LATE_HEARTBEAT_S:
        return warning(
            "nodes", found, remedy="see whether the machine, its network and its node are well"
        )
    if node.clock_skew_s is not None:
        found += f", clock {node.clock_skew_s:+.3f} s"
    if node.code_version != led_by:
        return warning(
            "nodes",
            f"{found}; the scheduler is of {led_by or 'unknown'}",
            remedy=f"upgrade the older of the two when {node.node} is idle",
        )
    return ok("nodes", found)


def _check_workers(status: Status) -> Finding:
    live = [p for p in status.pipelines if p.state not in ("finished", "failed")]
    workers = [worker for pipeline in live for worker in pipeline.workers]
    lost = [worker.worker for worker in workers if worker.state == "lost"]
    if lost:
        return warning(
            "workers", f"not heard: {', '.join(lost)}", remedy="see jigsaw status PIPELINE for each"
        )
    others = {w.worker: w.code_version for w in workers if w.state == "ready"}
    others = {name: v for name, v in others.items() if v != status.code_version}
    if others:
        listed = ", ".join(f"{name} {version or 'unknown'}" for name, version in others.items())
        return warning(
            "workers",
            f"of another version than the scheduler's, {status.code_version}: {listed}",
            remedy="they are replaced when their pipelines end; restart their node to do it now",
        )
    return ok("workers", f"{len(workers)} of {len(live)} pipelines")
