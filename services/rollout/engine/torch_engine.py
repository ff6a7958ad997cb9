"""The embedded engine: continuous batching on CPU or CUDA with torch alone.

Called by the rollout and evaluation services through `base.Engine`, from one thread. The invariant
that keeps it small: the cache holds keys and values of all tokens of a sequence but the last, and
a decode step runs the last one. So a prompt, a sequence that moved here half done, and a running one
after a change of weights are all "prefill all but the last token"; prefill makes no logits; and the
sequences of a group share one prefill of their prompt whatever becomes of them later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec
import structlog
import torch
import torch.nn.functional as F

from jigsawrl.core.slowdown import TAIL_SEQUENCES
from jigsawrl.turns import current_turn
from services.rollout.engine.agreement import agreeing_sizes
from services.rollout.engine.base import Generated, SequenceStart, Step, StepKind, Work
from services.rollout.engine.cache import SlotCache
from services.rollout.engine.invariant import InvariantDecoder
from services.rollout.engine.lengths import DrawnLengths
from services.rollout.engine.model import Decoder, Part
from services.rollout.engine.sampling import Sampling, draw
from services.rollout.engine.slots import Running, Slots
from services.rollout.engine.waiting import Waiting

log = structlog.get_logger()

SPAN_TOKENS = 32
"""Attention spans are rounded up to this: shapes repeat, and kernels like widths of whole vectors."""
PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward: bounds its memory."""


class Loaded(NamedTuple):
    """Exists from the first weights on."""

    decoder: Decoder
    cache: SlotCache
    version: int


class Agreement(NamedTuple):
    """Row counts that were found to give equal bits for a model."""

    model_config: str
    sizes: tuple[int, ...]


class TorchEngine:
    """See `base.Engine`."""

    def __init__(
        self,
        *,
        sampling: Sampling,
        max_running: int,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool | Literal["preferred"] = False,
        lengths: DrawnLengths | None = None,
        tail_sequences: int | None = None,
    ) -> None:
        """Decoding `tail_sequences` or fewer is a tail; None = what ships for the device.
        `deterministic`: True refuses models that can't be run so (ValueError with the first
        weights); ``preferred`` runs those as fast ones. With `lengths` no token ends a sequence."""
        self._sampling = sampling
        self._lengths = lengths
        self._deterministic = deterministic
        self._max_running = max_running
        self._device, self._dtype = device, dtype
        self._slots = Slots(device)
        self._waiting = Waiting()
        self._loaded: Loaded | None = None
        self._agreement: Agreement | None = None
        self._stops = torch.empty(0, dtype=torch.int64, device=device)
        self._longest = 0
        """Tokens of the longest running sequence, kept on the host so that no step asks for it."""
        self._tail_sequences = tail_sequences or TAIL_SEQUENCES[device.type]

    @property
    def version(self) -> int | None:
        return None if self._loaded is None else self._loaded.version

    @property
    def num_running(self) -> int:
        return self._slots.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def held(self) -> list[str]:
        running = [one.start.key for one in self._slots.running]
        return running + [start.key for start in self._waiting]

    def _ready(self) -> Loaded:
        assert self._loaded is not None, "weights come first"
        return self._loaded

    # --- Sequences in and out ---------------------------------------------------------------------

    def check(self, start: SequenceStart) -> str | None:
        decoder = self._ready().decoder
        if not start.prompt:
            return "the prompt has no tokens"
        num_tokens = len(start.prompt) + len(start.tokens)
        if num_tokens >= decoder.max_positions:
            return (
                f"{num_tokens} tokens leave no room to generate: the model has"
                f" {decoder.max_positions} positions (max_position_embeddings)"
            )
        largest = max(max(start.prompt), max(start.tokens, default=0))
        if largest >= decoder.vocab_size or min(start.prompt) < 0:
            return (
                f"token id {largest if largest >= decoder.vocab_size else min(start.prompt)} is"
                f" outside the model's vocabulary of {decoder.vocab_size}"
            )
        return None

    def add(self, starts: Iterable[SequenceStart]) -> None:
        self._waiting.add(starts)

    @torch.inference_mode()
    def drop(self, keys: Iterable[str]) -> None:
        gone = set(keys)
        self._waiting.drop(gone)
        running = self._slots.running
        self._leave({slot for slot, one in enumerate(running) if one.start.key in gone})

    @torch.inference_mode()
    def snapshot(self, keys: Iterable[str]) -> list[Generated]:
        wanted = set(keys)
        running = enumerate(self._slots.running)
        found = [self._slots.read(slot) for slot, one in running if one.start.key in wanted]
        return found + [Generated.of(start) for start in self._waiting if start.key in wanted]

    # --- Weights ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def load_weights(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        model_config: str,
        version: int,
        keep_kv: bool,
    ) -> None:
        decoder = self._decoder(state, model_config)
        cache = SlotCache(
            num_layers=decoder.num_layers,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            device=self._device,
            dtype=self._dtype,
        )
        if self._loaded is not None:
            cache = self._loaded.cache
        self._loaded = Loaded(decoder, cache, version)
        stops = decoder.stop_tokens if self._lengths is None else ()
        self._stops = torch.tensor(stops, dtype=torch.int64, device=self._device)
        if not keep_kv and self._slots.running:
            slots = list(range(self.num_running))
            prefixes = self._slots.prefixes(slots)
            self._prefill([(prefix, [slot]) for prefix, slot in zip(prefixes, slots, strict=True)])
            for one in self._slots.running:
                one.prefix_version = version

    def _decoder(self, state: Mapping[str, torch.Tensor], model_config: str) -> Decoder:
        device, dtype = self._device, self._dtype
        if not self._deterministic:
            return Decoder(state, model_config=model_config, device=device, dtype=dtype)
        try:
            decoder = InvariantDecoder(state, model_config=model_config, device=device, dtype=dtype)
            known = self._agreement
            if known is None or known.model_config != model_config:
                sizes = agreeing_sizes(decoder, self._sampling)
                known = self._agreement = Agreement(model_config, sizes)
        except ValueError as error:
            if self._deterministic is True:
                raise
            log.warning("results may vary with the batch", reason=str(error))
            self._deterministic = False
            return Decoder(state, model_config=model_config, device=device, dtype=dtype)
        decoder.sizes = known.sizes
        return decoder

    # --- Steps ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> Step:
        if self._loaded is None:
            return Step(finished=[], work=[])
        work = []
        if self._waiting and self.num_running < self._max_running:
            work.append(self._timed("prefill", self._join))
        if not self._slots.running:
            return Step(finished=[], work=work)
        finished: list[Generated] = []
        tail = self.num_running <= self._tail_sequences
        kind: StepKind = "tail_decode" if tail else "bulk_decode"
        work.append(self._timed(kind, lambda: self._decode(finished)))
        return Step(finished=finished, work=work)

    def _timed(self, kind: StepKind, run: Callable[[], int]) -> Work:
        started_s, begun, cpu_begun = time.time(), time.perf_counter(), time.thread_time()
        num_tokens = run()
        return Work(
            kind=kind,
            version=self._ready().version,
            started_s=started_s,
            duration_s=time.perf_counter() - begun,
            num_tokens=num_tokens,
            cpu_s=time.thread_time() - cpu_begun if self._device.type == "cpu" else None,
        )

    def _decode(self, finished: list[Generated]) -> int:
        loaded = self._ready()
        num = self.num_running
        self._reserve(self._longest + 1, num_slots=num)
        drawn = [self._draw(part) for part in loaded.decoder.parts(num)]
        tokens_N, logprobs_N = drawn[0]
        if len(drawn) > 1:
            tokens_N, logprobs_N = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        done = self._slots.append(tokens_N, logprobs_N, version=loaded.version, stops=self._stops)
        self._longest += 1
        for slot, stopped in done:
            read = self._slots.read(slot)
            group = self._slots.running[slot].start.group
            self._waiting.ended(group, num_tokens=len(read.tokens))
            reason = "stop" if stopped else "length"
            finished.append(msgspec.structs.replace(read, finish_reason=reason))
        self._leave({slot for slot, _ in done})
        return num

    def _draw(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens [N] of some sequences and their log-probs [N]."""
        loaded = self._ready()
        span = min(_round_up(self._longest), loaded.cache.capacity_tokens)
        columns = [*self._slots.current(), self._slots.next_draws()]
        columns = [column[part.first : part.end] for column in columns]
        padding = part.first + part.size - part.end
        if padding:  # rows of token 0 at position 0 of slots that are free
            columns = [F.pad(column, (0, padding)) for column in columns]
        tokens_N, positions_N, draws_N = columns
        logits_NV = loaded.decoder.decode(
            tokens_N, positions_N, loaded.cache, span=span, first_slot=part.first
        )
        tokens_N, logprobs_N = draw(logits_NV, draws_N, self._sampling)
        num = part.end - part.first
        return tokens_N[:num], logprobs_N[:num]

    def _leave(self, slots: set[int]) -> None:
        if not slots:
            return
        movers, holes = self._slots.leave(slots)
        if movers:
            self._ready().cache.copy(movers, holes, span=self._longest)
        self._longest = self._slots.longest()

    def _join(self) -> int:
        """Let waiting sequences into free slots; the number of tokens prefilled."""
        loaded = self._ready()
        first = self.num_running
        num = min(len(self._waiting), self._max_running - first)
        starts = self._waiting.take(num, running=self._slots.longest_of_groups)
        joining = [self._running(start) for start in starts]
        lengths = [len(one.start.prompt) + len(one.start.tokens) for one in joining]
        sources = self._siblings()
        self._reserve(max(*lengths, self._longest) + 1, num_slots=first + num)
        self._slots.join(joining)
        self._longest = max(*lengths, self._longest)
        rows: list[tuple[list[int], list[int]]] = []
        row_of_group: dict[str, list[int]] = {}
        copies: list[tuple[int, int]] = []
        for slot, one in enumerate(joining, start=first):
            start = one.start
            prefix = [*start.prompt, *start.tokens][:-1]
            if start.tokens:
                rows.append((prefix, [slot]))
            elif start.group in sources:
                copies.append((sources[start.group], slot))
            elif start.group in row_of_group:
                row_of_group[start.group].append(slot)
            else:
                row_of_group[start.group] = [slot]
                rows.append((prefix, row_of_group[start.group]))
        for source, slot in copies:
            span = len(self._slots.running[slot].start.prompt) - 1
            loaded.cache.copy([source], [slot], span=span)
        return self._prefill(rows)

    def _running(self, start: SequenceStart) -> Running:
        loaded = self._ready()
        num_new_tokens = start.max_new_tokens or self._sampling.max_new_tokens
        turn, begin = current_turn(start.versions)
        if self._lengths is not None:
            num_new_tokens = self._lengths.of(start.seed, turn=turn)
        limit = len(start.prompt) + begin + num_new_tokens
        return Running(
            start,
            prefix_version=loaded.version,
            limit=min(limit, loaded.decoder.max_positions),
        )

    def _siblings(self) -> dict[str, int]:
        """A slot of each running group whose prompt the loaded weights have seen."""
        version = self._ready().version
        return {
            one.start.group: slot
            for slot, one in enumerate(self._slots.running)
            if one.prefix_version == version
        }

    def _prefill(self, rows: list[tuple[list[int], list[int]]]) -> int:
        """Compute prefixes, each for all its slots; the number of real tokens."""
        loaded = self._ready()
        rows = sorted((row for row in rows if row[0]), key=lambda row: len(row[0]))
        num_tokens = sum(len(prefix) for prefix, _ in rows)
        while rows:
            num = max(1, PREFILL_TOKENS // len(rows[-1][0]))
            part, rows = rows[-num:], rows[:-num]
            padded = torch.zeros(len(part), len(part[-1][0]), dtype=torch.int64)
            for i, (prefix, _) in enumerate(part):
                padded[i, : len(prefix)] = torch.tensor(prefix)
            slots = [slot for _, targets in part for slot in targets]
            row_of_slot = [i for i, (_, targets) in enumerate(part) for _ in targets]
            loaded.decoder.prefill(padded.to(self._device), slots, row_of_slot, loaded.cache)
        return num_tokens

    def _reserve(self, num_tokens: int, *, num_slots: int = 0) -> None:
        """Room for sequences of `num_tokens`; doubles, so that growth is rare."""
        loaded = self._ready()
        if num_slots > loaded.cache.num_slots:
            num_slots = min(self._max_running, max(num_slots, 2 * loaded.cache.num_slots))
        if num_tokens > loaded.cache.capacity_tokens:
            doubled = max(num_tokens, 2 * loaded.cache.capacity_tokens)
            num_tokens = _round_up(min(doubled, loaded.decoder.max_positions))
        last = loaded.decoder.parts(num_slots)[-1]
        loaded.cache.grow(num_slots=last.first + last.size, capacity_tokens=num_tokens)
        self._slots.grow(num_rows=num_slots, capacity_tokens=num_tokens)


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // SPAN_TOKENS) * SPAN_TOKENS
