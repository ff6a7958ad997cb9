"""A run's events as a picture."""

from __future__ import annotations

import json
from pathlib import Path

from jigsawrl.contract.codec import encode
from jigsawrl.contract.events import (
    Event,
    SequencesExported,
    SharesApplied,
    SubStagesEnded,
    Tick,
    WorkerStarted,
)
from jigsawrl.contract.message import Worker
from jigsawrl.contract.parts import AppliedShare, SubStage
from services.scheduler.segments import Entry, write_segment
from services.scheduler.trace import trace

NODE = Worker(id="node", boot="n")
ROLLOUT = Worker(id="p.rollout0", boot="b")
SPAN = SubStage(
    kind="bulk_decode",
    version=2,
    started_s=100.0,
    ended_s=100.5,
    duration_s=0.4,
    num_iterations=8,
    num_tokens=512,
)
RECORDED: tuple[Event, ...] = (
    WorkerStarted(
        id="w", pipeline="p", worker=ROLLOUT, role="rollout", node="node", device="node/cpu1"
    ),
    Tick(id="t"),
    SharesApplied(
        id="s",
        node=NODE,
        device="node/cpu1",
        shares=(AppliedShare(tenant="p.rollout0", asked=0.5, applied=0.25),),
        mechanism="nice",
    ),
    SubStagesEnded(id="u", pipeline="p", worker=ROLLOUT, spans=(SPAN,)),
    SequencesExported(id="x", pipeline="p", worker=ROLLOUT, exported=()),
)


def test_each_device_is_a_process_and_each_tenant_a_thread_with_its_sub_stages(
    tmp_path: Path,
) -> None:
    payloads = [encode(event) for event in RECORDED] + [b"\xc1 no message"]
    entries = [Entry(i, 100.0 + i, payload) for i, payload in enumerate(payloads, start=1)]
    write_segment(tmp_path / "events", entries)
    events = trace(tmp_path)
    json.dumps(events)
    names = {e["args"]["name"]: (e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    assert names == {"node/cpu1": (1, None), "p.rollout0": (1, 1)}
    [slice_] = [e for e in events if e["ph"] == "X"]
    assert (slice_["name"], slice_["pid"], slice_["tid"]) == ("bulk_decode", 1, 1)
    assert (slice_["ts"], slice_["dur"]) == (100.0e6, 0.5e6)
    assert slice_["args"] == {
        "version": 2,
        "busy_s": 0.4,
        "iterations": 8,
        "tokens": 512,
        "share": 0.25,
    }
    [counter] = [e for e in events if e["ph"] == "C"]
    assert counter["args"] == {"p.rollout0": 0.25}
    assert [e["name"] for e in events if e["ph"] == "i"] == ["moved 0"]
