"""The client of a pipeline, against a stand-in scheduler on a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jigsawrl.bus.client import NatsBus
from jigsawrl.cli.config_file import load_config
from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.pipeline_client import PipelineClient
from jigsawrl.cli.plain_view import PlainView
from jigsawrl.config import PipelineConfig, decode_config
from jigsawrl.contract.message import Message
from jigsawrl.contract.requests import Status, Submit, Submitted
from tests.unit.cli.files import write_pipeline
from tests.unit.cli.statuses import FINISHED, activity, status

NOTHING = Status(
    id="s", leader="l", leader_epoch=1, stream_sequence=1, num_dead_letters=0, pipelines=()
)


class StandIn:
    """Accepts or refuses a submission, then tells one status after the other."""

    def __init__(self, statuses: Iterator[Status], *, error: str | None = None) -> None:
        self.submitted: list[PipelineConfig] = []
        self._statuses = statuses
        self._error = error

    async def answer(self, request: Any) -> Message:
        if isinstance(request, Submit):
            self.submitted.append(decode_config(request.config))
            return Submitted(id="submitted:1", error=self._error)
        return next(self._statuses)


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    return load_config(write_pipeline(tmp_path))


@contextlib.asynccontextmanager
async def serving(bus: NatsBus, stand_in: StandIn) -> AsyncIterator[None]:
    task = asyncio.create_task(bus.serve("scheduler", stand_in.answer))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def client(bus: NatsBus, config: PipelineConfig, write: Callable[[str], None]) -> PipelineClient:
    return PipelineClient(bus, [config], PlainView(write), run_id="run-1")


async def test_a_run_submits_its_config_and_ends_with_the_pipeline(
    bus: NatsBus, config: PipelineConfig
) -> None:
    stand_in = StandIn(iter([NOTHING, status(), status(version=1), status(**FINISHED)]))
    lines: list[str] = []
    async with serving(bus, stand_in):
        ended = await asyncio.wait_for(client(bus, config, lines.append).run(), 20)
    assert stand_in.submitted == [config]
    assert ended == list(status(**FINISHED).pipelines)
    assert "[tiny] step 1 of 3" in lines


async def test_a_pipeline_that_still_lives_is_watched_and_not_submitted_again(
    bus: NatsBus, config: PipelineConfig
) -> None:
    stand_in = StandIn(iter([status(version=1), status(**FINISHED)]))
    async with serving(bus, stand_in):
        ended = await asyncio.wait_for(client(bus, config, print).run(), 20)
    assert [one.state for one in ended] == ["finished"]
    assert stand_in.submitted == []


async def test_a_pipeline_that_the_scheduler_lost_ends_the_wait(
    bus: NatsBus, config: PipelineConfig
) -> None:
    stand_in = StandIn(iter([status(), NOTHING]))
    async with serving(bus, stand_in):
        with pytest.raises(CommandError, match="no longer knows pipeline tiny") as caught:
            await asyncio.wait_for(client(bus, config, print).run(), 20)
    assert caught.value.status == 1


async def test_a_pipeline_that_failed_is_submitted_again(
    bus: NatsBus, config: PipelineConfig
) -> None:
    stand_in = StandIn(iter([status(state="failed"), status(**FINISHED)]))
    async with serving(bus, stand_in):
        await asyncio.wait_for(client(bus, config, print).run(), 20)
    assert stand_in.submitted == [config]


async def test_a_refused_submission_is_bad_input(bus: NatsBus, config: PipelineConfig) -> None:
    stand_in = StandIn(iter([NOTHING, NOTHING]), error="the store has no room: 5 GB needed")
    async with serving(bus, stand_in):
        with pytest.raises(CommandError, match="5 GB needed") as caught:
            await asyncio.wait_for(client(bus, config, print).run(), 20)
    assert caught.value.status == 2


async def test_a_submission_whose_first_answer_was_lost_goes_on(
    bus: NatsBus, config: PipelineConfig
) -> None:
    told = [NOTHING, status(), status(**FINISHED)]
    stand_in = StandIn(iter(told), error="tiny is already running")
    async with serving(bus, stand_in):
        ended = await asyncio.wait_for(client(bus, config, print).run(), 20)
    assert [one.state for one in ended] == ["finished"]


async def test_activities_reach_the_view(bus: NatsBus, config: PipelineConfig) -> None:
    stand_in = StandIn(iter([status()] * 4 + [status(**FINISHED)]))
    lines: list[str] = []
    async with serving(bus, stand_in):
        running = asyncio.create_task(client(bus, config, lines.append).run())
        while not running.done():
            bus.publish_activity(activity(7))
            await asyncio.sleep(0.1)
        await running
    assert "[tiny] tiny.trainer0: warm-up 7 / 4000, accuracy 0.31" in lines


async def test_several_pipelines_are_submitted_in_order_and_watched_until_all_have_ended(
    bus: NatsBus, config: PipelineConfig
) -> None:
    other = msgspec.structs.replace(config, name="other")
    failed = {"state": "failed"}

    def both(first: dict[str, Any], second: dict[str, Any]) -> Status:
        told = status(**first).pipelines + status(pipeline="other", **second).pipelines
        return msgspec.structs.replace(NOTHING, pipelines=told)

    told = [NOTHING, both({}, {}), both({}, failed), both(FINISHED, failed)]
    stand_in = StandIn(iter(told))
    async with serving(bus, stand_in):
        running = PipelineClient(bus, [config, other], PlainView(print), run_id="run-1").run()
        ended = await asyncio.wait_for(running, 20)
    assert stand_in.submitted == [config, other]
    assert [(p.pipeline, p.state) for p in ended] == [("tiny", "finished"), ("other", "failed")]
