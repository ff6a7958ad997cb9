"""Partial records of live sequences, from which the scheduler restarts those whose worker dies.
`rollout` runs it beside commands."""

from __future__ import annotations

import asyncio
import time

from jigsawrl.bus.base import MessageTooLargeError
from jigsawrl.contract.events import SequencesProgressed
from jigsawrl.contract.parts import SequenceProgress
from services.rollout.engine.base import Generated
from services.rollout.engine_thread import EngineThread
from services.rollout.holdings import Holding, Holdings, record_of
from services.rollout.turns import Turns
from services.run import Context

PROGRESS_PERIOD_S = 3.0
PROGRESS_GROWTH = 2
"""A partial record is stored again once the sequence is this many times as long, so that all partial
records of a sequence together take no more room than twice the whole one."""


async def tell_progress(
    context: Context, holdings: Holdings, thread: EngineThread, turns: Turns
) -> None:
    """Until cancelled."""
    told: dict[str, int] = {}
    """Tokens of the last partial record of each live sequence."""
    while True:
        await asyncio.sleep(PROGRESS_PERIOD_S)
        held = holdings.older_than(time.monotonic() - PROGRESS_PERIOD_S)
        told = {key: told.get(key, 0) for key in held}
        progress = []
        for one in await _live(thread, turns, list(held)):
            # What left meanwhile may be here again under another epoch: these are not its tokens.
            holding = held[one.key]
            if holdings.get(one.key) is holding and _has_grown(one, told[one.key]):
                progress += await _stored(context, holding, one)
        told |= {one.sequence: one.num_tokens for one in progress}
        if progress:
            await context.bus.publish_event(
                SequencesProgressed(
                    id=context.new_id(SequencesProgressed.tag()),
                    pipeline=context.pipeline,
                    worker=context.worker,
                    progress=tuple(progress),
                )
            )


async def _live(thread: EngineThread, turns: Turns, keys: list[str]) -> list[Generated]:
    live = await thread.call(lambda engine: engine.snapshot(keys))
    # One that came or went meanwhile may be in both, or in neither until the next time.
    return list({one.key: one for one in (*live, *turns.snapshot(keys))}.values())


def _has_grown(generated: Generated, num_told: int) -> bool:
    return len(generated.own_versions) >= max(1, PROGRESS_GROWTH * num_told)


async def _stored(
    context: Context, holding: Holding, generated: Generated
) -> list[SequenceProgress]:
    try:
        ref = await context.store(record_of(holding, generated, pipeline=context.pipeline))
    except MessageTooLargeError:
        return []  # it fails, with the reason, once it is whole
    return [
        SequenceProgress(
            sequence=holding.sequence,
            epoch=holding.epoch,
            ref=ref,
            num_tokens=len(generated.own_versions),
        )
    ]
