"""An evaluation worker plays turns with the environment, greedily, and has the last one scored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from jigsawrl.bus.client import NatsBus
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.commands import Evaluate
from jigsawrl.contract.events import EvaluationFailed, EvaluationFinished
from jigsawrl.contract.message import Message, Ref, Worker
from jigsawrl.contract.requests import ScoreQuery, TurnQuery
from jigsawrl.models.init import build_model
from jigsawrl.models.tokenizer import load_tokenizer
from jigsawrl.models.weights import pack
from jigsawrl.tasks import build_task
from services.environment.environment import Environment
from services.reward.reward import Reward
from services.rollout.evaluation import Evaluation
from services.run import Context, Tenant
from tests.services.rollout_site import CONFIG, MODEL
from tests.services.test_rollout_turns import configure, twice

NUM_HELD_OUT = 5


def context(bus: Any, role: str) -> Context:
    worker = Worker(id=f"p.{role}0", boot="b")
    return Context(bus=bus, worker=worker, pipeline="p", run_folder=None, device=None)


class RecordingBus:
    """A bus that keeps what is asked and answered."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self.asked: list[tuple[Message, Any]] = []

    async def request(self, target: str, message: Message, *, timeout_s: float) -> Any:
        reply = await self._bus.request(target, message, timeout_s=timeout_s)
        self.asked.append((message, reply))
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


@asynccontextmanager
async def running(bus: Any, config: PipelineConfig) -> AsyncIterator[Evaluation]:
    """Environment, reward and evaluation of a pipeline."""
    evaluation = Evaluation(context(bus, "evaluation"))
    tenants: list[Tenant] = [
        Environment(context(bus, "environment")),
        Reward(context(bus, "reward")),
    ]
    for tenant in (*tenants, evaluation):
        await tenant.configure(config, configure(config, Worker(id=f"p.{tenant.role}0", boot="b")))
    serving = [asyncio.create_task(tenant.run()) for tenant in tenants]
    yield evaluation
    for task in serving:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*serving)
    for tenant in (*tenants, evaluation):
        await tenant.close()


async def weights(bus: Any, config: PipelineConfig) -> Ref:
    model = build_model(
        MODEL, load_tokenizer(MODEL, build_task(config.task, seed=0).alphabet), seed=0
    )
    manifest, payload = pack(
        model.state_dict(),
        pipeline="p",
        incarnation=0,
        version=0,
        model_config=model.config.to_json_string(),
    )
    return await bus.publish_weights(manifest, payload)


async def evaluated(bus: Any, config: PipelineConfig) -> EvaluationFinished:
    async with running(bus, config) as evaluation:
        command = Evaluate(
            id="c:e",
            worker=Worker(id="p.evaluation0", boot="b"),
            leader_epoch=1,
            incarnation=0,
            version=0,
            manifest=await weights(bus, config),
            attempt=0,
        )
        await evaluation.handle(command)
    async with asyncio.timeout(20):
        async for stored in bus.read_events(0):
            assert not isinstance(stored.event, EvaluationFailed), stored.event
            if isinstance(stored.event, EvaluationFinished):
                return stored.event
    raise AssertionError("the stream ended")


async def test_each_wrong_answer_is_tried_again_and_the_last_one_is_scored(bus: NatsBus) -> None:
    recording = RecordingBus(bus)
    end = await evaluated(recording, twice())
    turns = [(query, turn) for query, turn in recording.asked if isinstance(query, TurnQuery)]
    (answers,) = (query.answers for query, _ in recording.asked if isinstance(query, ScoreQuery))
    assert len(turns) == len(answers) == end.num_problems == NUM_HELD_OUT
    assert all(turn.observation is not None for _, turn in turns), "an untrained model is wrong"
    first = sum(len(query.turns[0].tolist()) for query, _ in turns)
    last = sum(len(answer.tokens.tolist()) for answer in answers)
    assert end.mean_num_tokens == (first + last) / NUM_HELD_OUT
    assert {query.sequence for query, _ in turns} == {f"evaluation/v0/{i}" for i in range(5)}


async def test_one_turn_asks_the_environment_for_nothing_but_problems(bus: NatsBus) -> None:
    recording = RecordingBus(bus)
    end = await evaluated(recording, CONFIG)
    assert end.num_problems == NUM_HELD_OUT
    assert not any(isinstance(query, TurnQuery) for query, _ in recording.asked)
