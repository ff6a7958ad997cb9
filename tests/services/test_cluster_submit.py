"""What `jigsaw submit` does with several pipelines."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from jigsawrl.bus.client import NatsBus
from jigsawrl.cli import cluster
from jigsawrl.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED
from jigsawrl.cli.plain_view import PlainView
from jigsawrl.config import InitModelConfig
from jigsawrl.contract.requests import Cancel
from tests.services.scheduler_steps import Start, config, status, until_true

WIDE = msgspec.structs.replace(
    config("wide"),
    model=InitModelConfig(hidden_size=2**20, intermediate_size=2**20, num_layers=256),
)
"""Refused: its numbers can't be told."""


async def test_one_that_is_refused_keeps_no_other_from_its_turn(
    bus: NatsBus, leading: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [config("a"), WIDE, config("b")]
    async with leading():
        code = await cluster.submit(cluster.Cluster(bus), configs, start_together=False, view=None)
        assert code == EXIT_BAD_INPUT
        assert [p.pipeline for p in (await status(bus)).pipelines] == ["a", "b"]
    told = capsys.readouterr()
    assert "pipeline wide can't be told to the cluster" in told.err
    assert told.err.count("\n") == 1
    assert "a is submitted" in told.out
    assert "b is submitted" in told.out


async def test_one_that_was_cancelled_while_it_is_waited_for_is_not_submitted_again(
    bus: NatsBus, leading: Start
) -> None:
    async with leading():
        waiting = asyncio.ensure_future(
            cluster.submit(
                cluster.Cluster(bus), [config("a")], start_together=False, view=PlainView(print)
            )
        )

        async def known() -> bool:
            return bool((await status(bus)).pipelines)

        await until_true(known)
        cancel = Cancel(id="c", pipeline="a", reason="enough")
        await bus.request("scheduler", cancel, timeout_s=10)
        assert await asyncio.wait_for(waiting, 20) in (EXIT_FAILED, EXIT_BAD_INPUT)
        assert (await status(bus)).pipelines[0].failure == "cancelled: enough"
