"""Handing live sequences over: stop them at a token boundary, store what there is of each, and answer
the order id by id. Called by `rollout`, which publishes the answer and forgets nothing before that.

The engine lets a sequence go at once, with its keys and values, which nobody moves: the next owner
computes them from the tokens. The tokens are held here until the answer is stored.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from jigsawrl.bus.base import MessageTooLargeError
from jigsawrl.contract.commands import MigrateSequences
from jigsawrl.contract.events import SequencesExported
from jigsawrl.contract.parts import Held, SequenceExport
from services.rollout.engine.base import Engine, Generated
from services.rollout.engine_thread import EngineThread
from services.rollout.holdings import Holding, Holdings, record_of
from services.rollout.turns import Turns
from services.run import Context


class Answer(NamedTuple):
    """What to publish, and what can't be stored: it fails, as it would at its end."""

    event: SequencesExported
    failed: list[tuple[Holding, str]]


async def hand_over(
    context: Context,
    thread: EngineThread,
    turns: Turns,
    holdings: Holdings,
    command: MigrateSequences,
) -> Answer:
    """Take the sequences of an order from the engine, and those that wait for their environment from
    `turns`, and store them."""
    wanted = dict.fromkeys(command.sequences)
    found = ((ask, holdings.get(ask[0])) for ask in wanted)
    held = {ask: one for ask, one in found if one is not None and one.epoch == ask[1]}
    names = [name for name, _ in held]
    async with turns.standing:
        live = {one.key: one for one in await thread.call(lambda engine: _take(engine, names))}
        # A turn that had ended in the engine is known to by now: its thread reports in order.
        live |= {one.key: one for one in turns.take(names)}
    going, finished, not_held = [], [], []
    for ask in wanted:
        name = ask[0]
        if ask in held and name in live:
            going.append((held[ask], live[name]))
        elif ask in held and holdings.waits(name):
            going.append((held[ask], Generated.of(held[ask].start)))
        elif holdings.ends(*ask):
            finished.append(Held(*ask))
        else:
            not_held.append(Held(*ask))
    stored = await asyncio.gather(*(_store(context, one, generated) for one, generated in going))
    failed = [one for one in stored if not isinstance(one, SequenceExport)]
    event = SequencesExported(
        id=context.new_id(SequencesExported.tag()),
        cause=command.id,
        pipeline=context.pipeline,
        worker=context.worker,
        exported=tuple(one for one in stored if isinstance(one, SequenceExport)),
        finished=(*finished, *(Held(one.sequence, one.epoch) for one, _ in failed)),
        not_held=tuple(not_held),
    )
    return Answer(event, failed)


def _take(engine: Engine, names: list[str]) -> list[Generated]:
    """Between two steps, so that no token is made after the record and none is missing from it."""
    live = engine.snapshot(names)
    engine.drop(one.key for one in live)
    return live


async def _store(
    context: Context, holding: Holding, generated: Generated
) -> SequenceExport | tuple[Holding, str]:
    ref = None
    if len(generated.tokens) > len(holding.start.tokens):
        record = record_of(holding, generated, pipeline=context.pipeline)
        try:
            ref = await context.store(record)
        except MessageTooLargeError as error:
            return holding, str(error)
    return SequenceExport(
        sequence=holding.sequence,
        epoch=holding.epoch,
        ref=ref,
        num_tokens=len(generated.own_versions),
        min_version=min(generated.own_versions, default=None),
        max_version=max(generated.own_versions, default=None),
    )
