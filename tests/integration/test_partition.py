"""The network between a rollout worker and NATS is cut in the middle of a move, and comes back."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from jigsawrl.bus.client import connect
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.cli.config_file import load_config
from jigsawrl.cli.pipeline_client import PipelineClient
from jigsawrl.cli.plain_view import PlainView
from jigsawrl.contract.codec import encode
from jigsawrl.contract.commands import Command, Drop, MigrateSequences, PlaceSequences
from jigsawrl.contract.events import SequencesExported, SequencesFinished
from jigsawrl.core.migration import EXPORT_LEASE_S
from services.scheduler.recorded import events_of
from services.scheduler.replay import replay
from tests.integration.proxy import proxy_to
from tests.integration.test_exactness import fingerprint, fingerprint_of
from tests.integration.test_isolation import programs, until
from tests.integration.test_migration import PIPELINE, TWO, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 16
"""Several after the worker's return, so that what it has to say comes before the end."""

FAR = "tiny.rollout9"
"""The worker behind the proxy; the other one is the node's."""


async def test_a_source_cut_off_amid_a_move_returns_and_is_not_believed(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    length = f"trainer.num_steps={NUM_STEPS}"
    with start(tmp_path / "undisturbed", length, policy="serial") as live:
        undisturbed = await asyncio.to_thread(fingerprint, live, num_steps=NUM_STEPS)
    state, runs, logs = tmp_path / "scheduler", tmp_path / "run", tmp_path / "logs"
    runs.mkdir()
    logs.mkdir()
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    config = load_config(tmp_path / "pipeline.toml", overrides=[length, TWO])
    async with AsyncExitStack() as last:
        bus = await connect(own_server.url, name="test")
        last.push_async_callback(bus.close)
        proxy = await last.enter_async_context(proxy_to(own_server.url))
        proxy.cut_when(large_order(5))
        begin = await last.enter_async_context(programs(own_server.url, logs))
        scheduler = await begin(
            "services.scheduler", "--state-dir", str(state), "--policy", "shuffle"
        )
        client = PipelineClient(bus, [config], PlainView(lambda line: None), run_id="run")
        running = asyncio.create_task(client.run())
        await until(client, lambda status: bool(status.pipelines))
        await begin("services.rollout", *("--pipeline", "tiny", "--worker", FAR), by=proxy.url)
        await until(client, lambda status: len(status.pipelines[0].workers) == 1)
        await begin(
            "services.node", "--state-dir", str(tmp_path / "node"), "--runs-folder", str(runs)
        )
        async with asyncio.timeout(180):  # a start on a busy machine
            await proxy.cut.wait()
        await asyncio.sleep(EXPORT_LEASE_S)
        assert client.status is not None
        version = client.status.pipelines[0].version or 0
        reached = lambda status: (status.pipelines[0].version or 0) > version  # noqa: E731
        await until(client, reached, timeout_s=180)  # the other one made it all
        proxy.heal()
        async with asyncio.timeout(240):
            [pipeline] = await running
        assert pipeline.state == "finished", pipeline.failure
        scheduler.terminate()  # it writes the rest of the events
        await scheduler.wait()
        received = bytes(proxy.received)
    assert fingerprint_of(runs / "tiny", num_steps=NUM_STEPS) == undisturbed
    for version in range(1, NUM_STEPS + 1):
        lines = (runs / f"tiny/trajectories/v{version}.jsonl").read_text().splitlines()
        names = [json.loads(line)["sequence"] for line in lines]
        assert len(set(names)) == len(names) == 16, "nothing is in the batch twice"
    commands = list(replay(state))
    late = late_entries(state, commands)
    assert late, "it handed over what had been given to the other"
    drops = [command for command in commands if isinstance(command, Drop)]
    told = [one for one in drops if one.worker.id == FAR and encode(one) in received]
    dropped = {entry for command in told for entry in command.sequences}
    assert dropped & late, "what it still held it was told to forget"
    assert pipeline.num_ignored >= len(late)


def large_order(number: int) -> Callable[[bytes], bool]:
    """Matches that order to hand over so much that some of it is still being generated."""
    orders = itertools.count(1)

    def matches(data: bytes) -> bool:
        large = MigrateSequences.tag().encode() in data and data.count(b"tiny/g") >= 4
        return large and next(orders) == number

    return matches


def late_entries(state: Path, commands: list[Command]) -> set[tuple[str, int]]:
    """(sequence, epoch) that the far worker told to have exported or finished after the sequence had
    been placed under a higher epoch. Some of it is exported."""
    placed: dict[str, list[tuple[int, int]]] = {}
    for command in commands:
        if isinstance(command, PlaceSequences):
            at = int(command.id.partition(".")[0])
            for placement in command.placements:
                placed.setdefault(placement.sequence, []).append((at, placement.epoch))
    exported: set[tuple[str, int]] = set()
    finished: set[tuple[str, int]] = set()
    for event, _, sequence in events_of(state):
        if not isinstance(event, SequencesExported | SequencesFinished) or event.worker.id != FAR:
            continue
        told = event.exported if isinstance(event, SequencesExported) else event.finished
        late = {
            (one.sequence, one.epoch)
            for one in told
            if any(
                at < sequence and epoch > one.epoch for at, epoch in placed.get(one.sequence, ())
            )
        }
        (exported if isinstance(event, SequencesExported) else finished).update(late)
    assert exported
    return exported | finished
