"""A rollout worker over a real nats-server with a real engine, and what a scheduler sees and says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from jigsawrl.bus.client import NatsBus
from jigsawrl.config import (
    InitModelConfig,
    PipelineConfig,
    RolloutConfig,
    SamplingConfig,
    SortDigitsConfig,
    TrainerConfig,
    encode_config,
)
from jigsawrl.contract.commands import Configure, LoadWeights, Placement, PlaceSequences
from jigsawrl.contract.events import Event, SequencesAccepted, WeightsLoaded
from jigsawrl.contract.message import Array, Ref, Worker
from jigsawrl.contract.parts import Held
from jigsawrl.contract.records import GroupRecord, SequenceRecord
from jigsawrl.models.init import build_model
from jigsawrl.models.tokenizer import build_tokenizer
from jigsawrl.models.weights import pack
from jigsawrl.tasks import build_task
from services.rollout.rollout import Rollout
from services.run import Context

WORKER = Worker(id="p.rollout0", boot="b1")
PROMPT = [3, 5, 4, 12]
MODEL = InitModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
)
CONFIG = PipelineConfig(
    name="p",
    device="cpu",
    model=MODEL,
    task=SortDigitsConfig(num_held_out=5),
    rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=24)),
    trainer=TrainerConfig(num_steps=9),
)

E = TypeVar("E", bound=Event)


class Site:
    """One worker, and what a scheduler would see and say."""

    def __init__(self, bus: NatsBus, rollout: Rollout, config: PipelineConfig) -> None:
        self.bus = bus
        self.tokenizer = build_tokenizer(build_task(config.task, seed=config.seed).alphabet)
        self._rollout = rollout
        self._ids = itertools.count()
        self._after = 0

    async def next(self, kind: type[E]) -> E:
        """The next event of a kind."""
        async with asyncio.timeout(30):
            async for stored in self.bus.read_events(self._after):
                self._after = stored.sequence
                if isinstance(stored.event, kind):
                    return stored.event
        raise AssertionError("the stream ended")

    def rewind(self) -> None:
        """Have `next` begin with the first event again: what it passed over comes, too."""
        self._after = 0

    async def tell(self, kind: type[Any], **fields: object) -> None:
        """Have a command carried out."""
        common = {"id": f"c:{next(self._ids)}", "worker": WORKER, "leader_epoch": 1}
        await self._rollout.handle(kind(**common, **fields))

    def held(self) -> tuple[Held, ...]:
        """What the next inventory will say."""
        return self._rollout.held()

    async def load(self, version: int, *, incarnation: int = 0) -> WeightsLoaded:
        """Publish fresh weights as this version and have them loaded."""
        model = build_model(MODEL, self.tokenizer, seed=version)
        manifest, payload = pack(
            model.state_dict(),
            pipeline="p",
            incarnation=incarnation,
            version=version,
            model_config=model.config.to_json_string(),
        )
        ref = await self.bus.publish_weights(manifest, payload)
        await self.tell(LoadWeights, incarnation=incarnation, version=version, manifest=ref)
        return await self.next(WeightsLoaded)

    async def prompt(
        self, group: str = "g0", tokens: list[int] = PROMPT, *, answer: str | None = None
    ) -> Ref:
        """Store a prompt."""
        record = GroupRecord(
            id=f"group:{group}",
            pipeline="p",
            group=group,
            epoch=0,
            cursor=0,
            prompt_tokens=Array.of("int32", tokens),
            prompt_text="",
            problem={} if answer is None else {"answer": answer},
        )
        return await self.bus.store(record)

    async def place(self, *placements: Placement, incarnation: int = 0) -> SequencesAccepted:
        """Place and see it accepted."""
        await self.tell(PlaceSequences, incarnation=incarnation, placements=placements)
        return await self.next(SequencesAccepted)

    async def record(self, ref: Ref) -> SequenceRecord:
        """A stored sequence."""
        record = await self.bus.load(ref)
        assert isinstance(record, SequenceRecord)
        return record


def placement(sequence: str, group: Ref, **changes: Any) -> Placement:
    fields: dict[str, Any] = {"epoch": 1, "seed": 7, "resume": None, "min_version": 0}
    return Placement(sequence=sequence, group=group, **(fields | changes))


@asynccontextmanager
async def rollout_site(bus: Any, config: PipelineConfig = CONFIG) -> AsyncIterator[Site]:
    """A configured worker that runs for the length of a block."""
    context = Context(bus=bus, worker=WORKER, pipeline="p", run_folder=None, device="node0/cpu0")
    rollout = Rollout(context)
    command = Configure(
        id="c",
        worker=WORKER,
        leader_epoch=1,
        config=encode_config(config),
        incarnation=0,
        gang_epoch=0,
    )
    await rollout.configure(config, command)
    running = asyncio.create_task(rollout.run())
    yield Site(bus, rollout, config)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await rollout.close()
