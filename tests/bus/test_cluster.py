"""Three servers with certificates: streams on all of them, and the death of the one that leads."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bus_samples import a_record, an_event, take, until
from clusters import Cluster
from nats.js.api import ClusterInfo
from secured import connect_as

from jigsawrl.bus.client import NatsBus
from tests.conftest import small_streams

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path, credentials: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, credentials) as cluster:
        yield cluster


async def shape_of(bus: NatsBus, stream: str) -> ClusterInfo:
    """Who leads and who follows."""
    info = await bus.connection.call("look", lambda js: js.stream_info(stream))
    assert info.cluster is not None
    return info.cluster


async def leader_of_all_in_step(bus: NatsBus, stream: str) -> str:
    """The name of the server that leads, once all others have what it has."""
    async with asyncio.timeout(60):
        while True:
            shape = await shape_of(bus, stream)
            followers = shape.replicas or []
            if shape.leader and len(followers) == 2 and all(one.current for one in followers):
                return shape.leader
            await asyncio.sleep(0.1)


async def test_the_death_of_the_leader_loses_nothing_and_stores_nothing_twice(
    cluster: Cluster, credentials: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leader = await connect_as("scheduler", cluster.url, credentials / "red", timeout_s=30)
    reward = await connect_as("reward", cluster.url, credentials / "red")
    await leader.create_streams(small_streams(leader))
    assert await leader.acquire_lease("scheduler", "a") is not None
    stored_s: list[float] = []
    stop = asyncio.Event()

    async def publish() -> None:
        while not stop.is_set():
            await leader.publish_event(an_event(len(stored_s)))
            stored_s.append(time.monotonic())

    publishing = asyncio.create_task(publish())
    gaps = []
    for number in range(2):
        dead = await leader_of_all_in_step(leader, "JIG_EVENTS")
        cluster.kill(dead)
        killed_s = time.monotonic()
        await until(lambda at=killed_s: sum(t > at for t in stored_s) >= 50, within_s=60)
        times = [killed_s, *(t for t in stored_s if t > killed_s)]
        gaps.append(max(after - before for before, after in itertools.pairwise(times)))
        ref = await reward.store(a_record(number))
        assert (await reward.load(ref)).sequence == str(number)
        cluster.start(dead)
    stop.set()
    await publishing
    with capsys.disabled():
        shown = ", ".join(f"{gap:.2f} s" for gap in gaps)
        print(f"\npublishes flow again {shown} after the leader's death")
    events = await take(leader.read_events(0), len(stored_s), within_s=60)
    ids = [stored.event.id for stored in events if stored.event is not None]
    assert ids == [f"e:{number}" for number in range(len(stored_s))]
    assert (await leader.fill("JIG_EVENTS")).num_messages == len(stored_s)
    await leader.close()
    await reward.close()


async def test_a_certificate_of_a_role_makes_no_server_of_the_cluster(
    cluster: Cluster, tmp_path: Path, credentials: Path
) -> None:
    """Whoever is a route is above all permissions."""
    stolen, config = credentials / "red" / "rollout.pem", tmp_path / f"{cluster.names[0]}.conf"
    clients, cut, routes = config.read_text().partition("cluster {")
    for part in ("server.pem", "server.key"):
        routes = routes.replace(str(credentials / part), str(stolen))
    cluster.kill(cluster.names[0])
    config.write_text(clients + cut + routes)
    cluster.start(cluster.names[0])
    others = [tmp_path / f"{other}.log" for other in cluster.names[1:]]
    await until(lambda: all("authentication error" in log.read_text() for log in others))
