"""Fixtures shared by all tests: one real nats-server per test run, a fresh prefix per test."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from jigsawrl.bus.client import NatsBus, connect
from jigsawrl.bus.server import EmbeddedServer, start_server
from jigsawrl.contract.streams import StreamSpec

_prefixes = itertools.count()


def small_streams(bus: NatsBus) -> list[StreamSpec]:
    """The cluster's streams and those of the pipeline ``p``, small enough for many tests."""
    subjects = bus.subjects
    specs = [*subjects.cluster_streams(), subjects.data_stream("p"), subjects.weights_stream("p")]
    return [msgspec.structs.replace(spec, max_bytes=64 * 1024**2) for spec in specs]


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """The server that most tests share; those that hurt it start their own."""
    server = asyncio.run(start_server(tmp_path_factory.mktemp("nats")))
    yield server
    server.stop()


@pytest.fixture
def prefix() -> str:
    """A first subject token that no other test uses."""
    return f"t{next(_prefixes)}"


@pytest.fixture
async def bus(nats_server: EmbeddedServer, prefix: str) -> AsyncIterator[NatsBus]:
    """A connected bus with the cluster's streams and one pipeline's, small ones, ``p``."""
    bus = await connect(nats_server.url, name="test", prefix=prefix)
    await bus.create_streams(small_streams(bus))
    yield bus
    await bus.delete_streams(spec.name for spec in small_streams(bus))
    await bus.close()


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A server of this test alone."""
    server = await start_server(tmp_path / "store")
    yield server
    server.stop()


@pytest.fixture
async def own_bus(own_server: EmbeddedServer, prefix: str) -> AsyncIterator[NatsBus]:
    """A bus on `own_server`, with streams."""
    bus = await connect(own_server.url, name="test", prefix=prefix)
    await bus.create_streams(small_streams(bus))
    yield bus
    await bus.close()
