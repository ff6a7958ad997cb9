"""A relay between one worker and the real nats-server that can be cut as a network is: nothing passes
any more, and both ends still believe in their connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

CHUNK_BYTES = 1 << 16

LAST_WORDS_S = 0.1
"""The direction to the worker stays open for so long after the bytes that it was to be cut at, so that
the rest of that message arrives."""


class Proxy:
    """Forwards bytes both ways while it is not cut. What is sent meanwhile arrives once it is healed,
    late and in order, also on connections that an end has given up."""

    def __init__(self, host: str, port: int) -> None:
        """To the server there."""
        self._host, self._port = host, port
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_server, self._to_worker = asyncio.Event(), asyncio.Event()
        self._when: Callable[[bytes], bool] | None = None
        self.cut = asyncio.Event()
        self.received = bytearray()
        """All that the worker was sent since the last heal."""
        self.url = ""
        self.heal()

    def cut_when(self, matches: Callable[[bytes], bool]) -> None:
        """Cut once the worker is sent such bytes, and before it can answer."""
        self._when = matches

    def heal(self) -> None:
        """Let all pass again."""
        self.received.clear()
        self.cut.clear()
        self._to_server.set()
        self._to_worker.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the worker. One made during a cut is not answered."""
        await self._to_server.wait()
        from_server, to_server = await asyncio.open_connection(self._host, self._port)
        for pump in (
            self._pump(reader, to_server, self._to_server),
            self._pump(from_server, writer, self._to_worker, watched=True),
        ):
            task = asyncio.create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passes: asyncio.Event,
        *,
        watched: bool = False,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await passes.wait()
                if watched:
                    self._watch(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    def _watch(self, data: bytes) -> None:
        self.received += data
        if self._when is not None and self._when(data):
            self._when = None
            self._to_server.clear()
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut_off)

    def _cut_off(self) -> None:
        self._to_worker.clear()
        self.cut.set()

    async def close(self) -> None:
        """End what is still open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxy_to(url: str) -> AsyncIterator[Proxy]:
    """A proxy that listens on a free port until the end."""
    host, _, port = url.removeprefix("nats://").rpartition(":")
    proxy = Proxy(host, int(port))
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
