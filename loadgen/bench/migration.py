"""``python -m loadgen.bench.migration [--json]``: a move of live sequences against a bare prefill.

Two rollout workers as processes of their own and a nats-server, all on this machine; this program
says what a scheduler would. From the order to hand over until the next token exists at the target (the
end of its first decode step, by its sub-stages), against the prefill of the same prompt and tokens, as
prompts, by the same engine. Moves and prefills alternate, so that a busy machine slows both alike. The
core's own part is not in it: it decides in the message that brings the answer, or 20 ms later.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from jigsawrl.bus.base import StoredEvent
from jigsawrl.bus.client import NatsBus, connect
from jigsawrl.bus.server import start_server
from jigsawrl.config import (
    DrawnLengthsConfig,
    InitModelConfig,
    PipelineConfig,
    RolloutConfig,
    SamplingConfig,
    SortDigitsConfig,
    TorchEngineConfig,
    TrainerConfig,
    encode_config,
)
from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import Array, Ref, Worker
from jigsawrl.contract.records import GroupRecord, SequenceRecord
from jigsawrl.models.init import build_model
from jigsawrl.models.tokenizer import build_tokenizer
from jigsawrl.models.weights import pack
from loadgen.bench.output import Say, parser_of, say_of

SIZES = ((1, 64), (1, 256), (1, 1024), (8, 256))
"""(sequences moved together, tokens that each has generated)."""
NUM_PROMPT_TOKENS = 32
NUM_REPEATS = 5
MAX_TOKENS = 1900
SETTLE_S = 0.7
"""Longer than the period in which workers tell of their work: what is told next began after it."""
TIMEOUT_S = 60.0
ALPHABET = "0123456789="
MODEL = InitModelConfig(max_position_embeddings=2048)
CONFIG = PipelineConfig(
    name="bench",
    device="cpu",
    model=MODEL,
    task=SortDigitsConfig(num_held_out=5),
    rollout=RolloutConfig(
        sampling=SamplingConfig(max_new_tokens=MAX_TOKENS),
        engine=TorchEngineConfig(
            drawn_lengths=DrawnLengthsConfig(
                median_tokens=MAX_TOKENS, p95_tokens=MAX_TOKENS, max_tokens=MAX_TOKENS
            )
        ),
    ),
    trainer=TrainerConfig(num_steps=1),
)
SOURCE, TARGET = Worker("bench.rollout0", "b"), Worker("bench.rollout1", "b")

E = TypeVar("E", bound=e.Event)


class Row(msgspec.Struct, frozen=True):
    """Medians for one size, milliseconds."""

    num_sequences: int
    num_tokens: int
    """Of each, prompt and first tokens: what the target computes again."""
    move_ms: float
    """From the command to the next token."""
    export_ms: float
    """Of that until the answer is here."""
    prefill_ms: float
    ratio: float


class Live(NamedTuple):
    """One sequence to be moved."""

    name: str
    group: Ref
    record: Ref


class Bench:
    """What a scheduler says and sees."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._events: AsyncIterator[StoredEvent] = bus.read_events(0)
        self._random = random.Random(0)
        self._num = 0

    def _next_number(self) -> int:
        self._num += 1
        return self._num

    async def next(self, kind: type[E], worker: Worker) -> E:
        """The next event of this kind by this worker; others in between are passed over."""
        async with asyncio.timeout(TIMEOUT_S):
            async for stored in self._events:
                event: Any = stored.event
                if isinstance(event, kind) and event.worker == worker:  # type: ignore[attr-defined]
                    return event
        raise AssertionError("the stream ended")

    async def tell(self, kind: type[c.Command], worker: Worker, **fields: Any) -> None:
        """Send one command."""
        number = self._next_number()
        await self._bus.publish_command(
            kind(id=f"bench.{number}", worker=worker, leader_epoch=1, **fields)
        )

    async def set_up(self) -> None:
        """Configure both workers, one after the other, and have them load the same weights."""
        model = build_model(MODEL, build_tokenizer(ALPHABET), seed=0)
        manifest, payload = pack(
            model.state_dict(),
            pipeline="bench",
            incarnation=0,
            version=0,
            model_config=model.config.to_json_string(),
        )
        ref = await self._bus.publish_weights(manifest, payload)
        config = encode_config(CONFIG)
        for worker in (SOURCE, TARGET):
            await self.tell(c.Configure, worker, config=config, incarnation=0, gang_epoch=0)
            await self.tell(c.LoadWeights, worker, incarnation=0, version=0, manifest=ref)
        for worker in (SOURCE, TARGET):
            await self.next(e.WeightsLoaded, worker)
            self._events = self._bus.read_events(0)

    async def _prompt(self, name: str, tokens: list[int]) -> Ref:
        record = GroupRecord(
            id=f"group:{name}",
            pipeline="bench",
            group=name,
            epoch=0,
            cursor=0,
            prompt_tokens=Array.of("int32", tokens),
            prompt_text="",
            problem={},
        )
        return await self._bus.store(record)

    async def _live(self, num_tokens: int) -> tuple[Live, list[int]]:
        """Records of a sequence that stopped after so many tokens, and all its tokens."""
        name = f"bench/g{self._next_number()}"
        tokens = [self._random.randrange(len(ALPHABET)) for _ in range(num_tokens)]
        prompt = [self._random.randrange(len(ALPHABET)) for _ in range(NUM_PROMPT_TOKENS)]
        record = SequenceRecord(
            id=f"record:{name}",
            pipeline="bench",
            group=name,
            sequence=f"{name}/s0",
            epoch=0,
            num_prompt_tokens=len(prompt),
            tokens=Array.of("int32", prompt + tokens),
            logprobs=Array.of("float32", [0.0] * len(prompt) + [-1.0] * num_tokens),
            versions=Array.of("int32", [-1] * len(prompt) + [0] * num_tokens),
            loss_mask=Array.of("uint8", [0] * len(prompt) + [1] * num_tokens),
            finish_reason=None,
        )
        group = await self._prompt(name, prompt)
        ref = await self._bus.store(record)
        return Live(f"{name}/s0", group, ref), prompt + tokens

    async def _place(self, worker: Worker, placements: list[c.Placement]) -> None:
        await self.tell(c.PlaceSequences, worker, incarnation=0, placements=tuple(placements))

    async def _forget(self, worker: Worker, names: list[str]) -> None:
        await self.tell(c.Drop, worker, sequences=tuple((name, 99) for name in names))
        await asyncio.sleep(SETTLE_S)

    async def move(self, num_sequences: int, num_tokens: int) -> tuple[float, float, list[Ref]]:
        """Seconds from the command to the next token, and to the answer; the records moved."""
        lives = [(await self._live(num_tokens))[0] for _ in range(num_sequences)]
        await self._place(SOURCE, [_placement(one, 1, one.record) for one in lives])
        await self.next(e.SequencesAccepted, SOURCE)
        await asyncio.sleep(SETTLE_S)
        started_s = time.time()
        await self.tell(c.MigrateSequences, SOURCE, sequences=tuple((one.name, 1) for one in lives))
        answer = await self.next(e.SequencesExported, SOURCE)
        export_s = time.time() - started_s
        records = [one.ref for one in answer.exported if one.ref is not None]
        assert len(records) == num_sequences, "each has new tokens"
        await self._place(
            TARGET, [_placement(one, 2, ref) for one, ref in zip(lives, records, strict=True)]
        )
        decode = await self._span(("tail_decode", "bulk_decode"))
        await self._forget(TARGET, [one.name for one in lives])
        first_token_s = decode.started_s + decode.duration_s / decode.num_iterations
        return first_token_s - started_s, export_s, records

    async def prefill(self, records: list[Ref]) -> tuple[float, int]:
        """Seconds of the bare prefill of these sequences by the target, and the tokens of the last."""
        placements = []
        num_tokens = 0
        for ref in records:
            record = await self._bus.load(ref)
            name = f"bench/g{self._next_number()}"
            tokens = record.tokens.tolist()
            num_tokens = len(tokens)
            group = await self._prompt(name, tokens)
            placements.append(_placement(Live(f"{name}/s0", group, ref), 1, None))
        await self._place(TARGET, placements)
        span = await self._span(("prefill",))
        assert span.num_iterations == 1
        await self._forget(TARGET, [one.sequence for one in placements])
        return span.duration_s, num_tokens

    async def _span(self, kinds: tuple[str, ...]) -> parts.SubStage:
        while True:
            event = await self.next(e.SubStagesEnded, TARGET)
            for span in event.spans:
                if span.kind in kinds:
                    return span


def _placement(one: Live, epoch: int, resume: Ref | None) -> c.Placement:
    return c.Placement(
        sequence=one.name, epoch=epoch, group=one.group, seed=7, resume=resume, min_version=0
    )


async def measure(bench: Bench, num_sequences: int, num_tokens: int) -> Row:
    """Medians over alternating moves and prefills; the first pair warms up and does not count."""
    moves, exports, prefills, sizes = [], [], [], []
    for repeat in range(NUM_REPEATS + 1):
        move_s, export_s, records = await bench.move(num_sequences, num_tokens)
        prefill_s, size = await bench.prefill(records)
        if repeat:
            moves.append(move_s)
            exports.append(export_s)
            prefills.append(prefill_s)
            sizes.append(size)
    move_ms, export_ms, prefill_ms = (
        round(1000 * statistics.median(values), 2) for values in (moves, exports, prefills)
    )
    ratio = statistics.median(m / p for m, p in zip(moves, prefills, strict=True))
    num_tokens = round(statistics.median(sizes))
    return Row(num_sequences, num_tokens, move_ms, export_ms, prefill_ms, round(ratio, 3))


async def bench_all(folder: Path, say: Say) -> list[Row]:
    """Server and workers up, all sizes, everything down."""
    server = await start_server(folder)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        bus = await connect(server.url, name="bench")
        subjects = bus.subjects
        streams = [subjects.data_stream("bench"), subjects.weights_stream("bench")]
        await bus.create_streams([*subjects.cluster_streams(), *streams])
        workers += [_spawn(worker, server.url, folder) for worker in (SOURCE, TARGET)]
        bench = Bench(bus)
        for worker in (SOURCE, TARGET):
            await Bench(bus).next(e.WorkerStarted, worker)
        await bench.set_up()
        rows = []
        for num_sequences, num_tokens in SIZES:
            rows.append(await measure(bench, num_sequences, num_tokens))
            say(f"{rows[-1]}")
        await bus.close()
        return rows
    finally:
        for process in workers:
            process.kill()
            process.wait()
        server.stop()


def _spawn(worker: Worker, url: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "services.rollout", "--url", url, "--pipeline", "bench"]
    command += ["--worker", worker.id, "--boot", worker.boot]
    with (folder / f"{worker.id}.log").open("wb") as log:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=log, env=env)


def main() -> None:
    say = say_of(parser_of("migration", __doc__).parse_args())
    with tempfile.TemporaryDirectory(prefix="jigsaw-migration-") as folder:
        rows = asyncio.run(bench_all(Path(folder), say))
    longest = max(rows, key=lambda row: row.num_tokens)
    print(json.dumps({"ratio": longest.ratio, "rows": msgspec.to_builtins(rows)}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
