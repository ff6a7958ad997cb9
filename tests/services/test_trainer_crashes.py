"""A trainer that dies before or after any message of the batch-cut and checkpoint protocol is replaced
by one that trains the same: bit for bit, each step on record once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jigsawrl.bus.client import NatsBus
from jigsawrl.contract.events import CheckpointCommitted, VersionPublished
from services.trainer import checkpoint
from services.trainer.parallel import leave_gang
from tests.services.test_trainer import (
    CONFIG,
    boot,
    configure_command,
    make_cut,
    publish_command,
    worker,
)

pytestmark = pytest.mark.slow

NUM_STEPS = 2
MESSAGES = ("publish_event", "publish_weights", "retain_weights")


class Crash(BaseException):
    """The process is gone: nothing of it runs any more."""


class FatalBus:
    """A bus on which the process dies at its n-th message, before or after the server has it. (The
    trainer can't be killed at an exact message from outside.)"""

    def __init__(self, bus: NatsBus, *, at: int | None, before: bool) -> None:
        self.num_messages = 0
        self._bus = bus
        self._at = at
        self._before = before

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._bus, name)
        if name not in MESSAGES:
            return method

        async def send(*arguments: Any, **options: Any) -> Any:
            number, self.num_messages = self.num_messages, self.num_messages + 1
            if number == self._at and self._before:
                raise Crash
            result = await method(*arguments, **options)
            if number == self._at:
                raise Crash
            return result

        return send


class UnmarkedBus:
    """A bus on which the process dies when it announces a checkpoint, whose marker is then gone: what
    lies there is what a death just before the marker leaves."""

    def __init__(self, bus: NatsBus, *, marker: Path) -> None:
        self._bus = bus
        self._marker = marker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish_event(self, event: Any) -> int:
        if self._marker.exists():
            self._marker.unlink()
            raise Crash
        return await self._bus.publish_event(event)


async def live(bus: Any, folder: Path, cuts: list[Any], *, gang_epoch: int) -> int:
    """One boot: whatever version it restores (returned), it is told to publish it and to train on."""
    trainer = boot(bus, folder, gang_epoch)
    try:
        restored = await trainer.configure(CONFIG, configure_command(gang_epoch))
        await trainer.handle(publish_command(restored.version, gang_epoch=gang_epoch))
        for cut in cuts[restored.version :]:
            await trainer.handle(cut)
        return restored.version
    finally:
        await trainer._thread.stop(leave_gang)


async def result(bus: NatsBus, folder: Path) -> tuple[Any, ...]:
    """Losses on record, the version's weights, and what was announced of each version."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = None
    committed = set()
    told = {}
    num = (await bus.fill(bus.subjects.events_stream().name)).num_messages
    async for stored in bus.read_events(0):
        event = stored.event
        if isinstance(event, VersionPublished):
            told[event.version] = (event.num_trained_tokens, event.metrics.get("loss"))
            last = event.manifest if event.version == NUM_STEPS else last
        if isinstance(event, CheckpointCommitted):
            committed.add(event.version)
        if stored.sequence >= num:
            break
    assert last is not None
    manifest, _ = await bus.fetch_weights(last)
    return [(line["version"], line["loss"]) for line in lines], manifest.sha256, committed, told


async def test_a_crash_at_any_message_changes_nothing(
    bus: NatsBus, tmp_path: Path, prefix: str
) -> None:
    cuts = [await make_cut(bus, version) for version in range(NUM_STEPS)]
    counting = FatalBus(bus, at=None, before=True)
    (tmp_path / "undisturbed").mkdir()
    await live(counting, tmp_path / "undisturbed", cuts, gang_epoch=1)
    wanted = await result(bus, tmp_path / "undisturbed")
    assert counting.num_messages > 8
    assert [version for version, _ in wanted[0]] == [1, 2]
    assert [num_tokens for num_tokens, _ in wanted[-1].values()] == [0, 12, 12]
    for number in range(counting.num_messages):
        for before in (True, False):
            folder = tmp_path / f"{number}-{before}"
            folder.mkdir()
            first = FatalBus(bus, at=number, before=before)
            epoch = 2 + 2 * (2 * number + before)
            with pytest.raises(Crash):
                await live(first, folder, _for_gang(cuts, epoch), gang_epoch=epoch)
            await live(bus, folder, _for_gang(cuts, epoch + 1), gang_epoch=epoch + 1)
            assert await result(bus, folder) == wanted, f"died at message {number}, {before=}"


async def test_a_crash_before_the_marker_of_a_checkpoint_changes_nothing(
    bus: NatsBus, tmp_path: Path
) -> None:
    cuts = [await make_cut(bus, version) for version in range(NUM_STEPS)]
    for name in ("undisturbed", "crashed"):
        (tmp_path / name).mkdir()
    await live(bus, tmp_path / "undisturbed", cuts, gang_epoch=1)
    wanted = await result(bus, tmp_path / "undisturbed")
    folder = tmp_path / "crashed"
    unmarked = folder / "checkpoints" / f"v{NUM_STEPS}-e2"
    dying = UnmarkedBus(bus, marker=unmarked / "COMMITTED")
    with pytest.raises(Crash):
        await live(dying, folder, _for_gang(cuts, 2), gang_epoch=2)
    assert (unmarked / "state.json").exists()
    assert not checkpoint.is_committed(unmarked)
    restored = await live(bus, folder, _for_gang(cuts, 3), gang_epoch=3)
    assert restored == 0, "the older one"
    assert await result(bus, folder) == wanted


def _for_gang(cuts: list[Any], gang_epoch: int) -> list[Any]:
    return [
        msgspec.structs.replace(
            cut, id=f"{cut.id}-{gang_epoch}", worker=worker(gang_epoch), gang_epoch=gang_epoch
        )
        for cut in cuts
    ]
