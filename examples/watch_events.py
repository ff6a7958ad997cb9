"""Watch a running pipeline from a second terminal: its sub-stages and milestones as text.

    python examples/watch_events.py nats://127.0.0.1:4222 [PIPELINE]

It needs the packages nats-py and msgpack only, and no part of JigsawRL: every event is a NATS message
on ``jig.event.<pipeline>.<type>`` whose payload is a MessagePack map (see docs/messages.md). Any
language with a NATS client and a MessagePack library can do the same. Watching disturbs nothing; what
was said before the subscription is on the stream (see docs/bus.md).
"""

import asyncio
import contextlib
import sys
import time

import msgpack
import nats


def lines_of(event: dict) -> list[str]:
    """What is worth reading of one event."""
    kind = event["type"]
    if kind == "sub_stages_ended":
        return [
            f"{event['worker']['id']:<28} {span['kind']:<18} version {span['version']:<4}"
            f" {span['duration_s'] * 1000:8.1f} ms  {span['num_tokens']:>7} tokens"
            for span in event["spans"]
        ]
    if kind == "version_published":
        shown = ("reward_mean", "loss", "tokens_per_s")
        metrics = "  ".join(
            f"{key}={event['metrics'][key]:.4g}" for key in shown if key in event["metrics"]
        )
        return [f"{event['worker']['id']:<28} published version {event['version']}  {metrics}"]
    if kind == "evaluation_finished":
        score = f"{event['num_correct']} of {event['num_problems']} correct"
        return [f"{event['worker']['id']:<28} evaluated version {event['version']}: {score}"]
    if kind in ("sequences_finished", "sequences_rewarded"):
        done = event.get("finished", event.get("rewarded", ()))
        return [f"{event['worker']['id']:<28} {kind.replace('_', ' ')}: {len(done)}"]
    if kind == "shares_applied":
        parts = [f"{entry['tenant']} {entry['applied']:.2f}" for entry in event["shares"]]
        return [f"{event['device']:<28} divided by {event['mechanism']}: {', '.join(parts)}"]
    if kind in ("tick", "heartbeat"):
        return []
    worker = event.get("worker") or {"id": event.get("pipeline") or "cluster"}
    return [f"{worker['id']:<28} {kind.replace('_', ' ')}"]


async def watch(url: str, pipeline: str) -> None:
    """Print until interrupted."""
    try:
        client = await nats.connect(url, allow_reconnect=False)
    except (OSError, nats.errors.NoServersError):
        sys.exit(f"no NATS server answers at {url}; a run prints its address as `bus: ...`")
    events = await client.subscribe(f"jig.event.{pipeline}.>")
    print(f"watching {events.subject} at {url}", flush=True)
    async for message in events.messages:
        for line in lines_of(msgpack.unpackb(message.data)):
            print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/watch_events.py URL [PIPELINE]")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(watch(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "*"))
