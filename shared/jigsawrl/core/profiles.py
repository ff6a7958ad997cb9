"""The profile that decides: the one that a leader adopted, else what ships for the kind of device."""

from __future__ import annotations

from functools import lru_cache

from jigsawrl.contract.profile import SlowdownProfile
from jigsawrl.core.slowdown import CPU_SLOT, TAIL_SEQUENCES, SlowdownTable
from jigsawrl.core.state import Pipeline, State


def table(state: State) -> SlowdownTable:
    """Of the adopted profile; that of a CPU slot where there is none."""
    return _table(CPU_SLOT if state.profile is None else state.profile.slowdown)


@lru_cache(maxsize=4)
def _table(profile: SlowdownProfile) -> SlowdownTable:
    """Building one walks all rows; a profile stays for the whole run."""
    return SlowdownTable(profile)


def note_tail(state: State, pipeline: Pipeline) -> None:
    """Fix where the tail of a pipeline that starts begins: its workers are told, and go on with that
    when a later leader adopts another profile."""
    if state.profile is not None:
        pipeline.tail_sequences = state.profile.tail_sequences
        return
    kinds = {device.id: device.kind for node in state.nodes.values() for device in node.devices}
    rollout = (t.device for t in pipeline.tenants.values() if t.role == "rollout")
    kind = next((kinds[device] for device in rollout if device in kinds), "cpu")
    pipeline.tail_sequences = TAIL_SEQUENCES[kind]
