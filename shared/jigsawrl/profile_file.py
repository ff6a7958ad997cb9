"""Reads a file that `jigsaw profile` wrote, and refuses what can't be one.

Called by the command before anything starts, and by the scheduler process.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from jigsawrl.contract.profile import DecodeCost, DeviceProfile, SlowdownProfile, SlowdownRow
from jigsawrl.core.slowdown import check_profile

_TABLES: dict[str, type[msgspec.Struct]] = {
    "": DeviceProfile,
    "slowdown": SlowdownProfile,
    "slowdown.rows[]": SlowdownRow,
    "decode_s[]": DecodeCost,
}
"""By path in the file."""

MAX_BYTES = 1 << 20
"""It travels in one event, which holds 8 MiB with the rest; `jigsaw profile` writes some 20 KiB."""


def read_profile(path: Path, *, device_kind: str | None) -> DeviceProfile:
    """For devices of a kind (None: whatever it is of). Raises ValueError, one line with the path."""
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror}") from None
    try:
        return _decode(payload, device_kind)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _decode(payload: bytes, device_kind: str | None) -> DeviceProfile:
    if len(payload) > MAX_BYTES:
        raise ValueError(f"{len(payload)} bytes, but a profile has at most {MAX_BYTES}")
    try:
        unknown = _unknown_key(msgspec.json.decode(payload), "")
        if unknown is not None:
            raise ValueError(f"{unknown}: unknown key; remove it, or run `jigsaw profile` again")
        profile = msgspec.json.decode(payload, type=DeviceProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no profile as `jigsaw profile` writes one: {error}") from None
    slowdown = profile.slowdown
    check_profile(slowdown, device_kind=device_kind or slowdown.device_kind)
    if profile.tail_sequences < 1:
        raise ValueError("tail_sequences is at least 1: one sequence is always a tail")
    for place, cost in enumerate(profile.decode_s):
        if cost.num_sequences < 1 or cost.iteration_s <= 0:
            raise ValueError(f"decode_s[{place}]: sequences and seconds are above 0")
    return profile


def _unknown_key(given: Any, path: str) -> str | None:
    """The first key that has no meaning. The wire ignores such keys; in a file that people may edit
    they are mistakes."""
    members = given.items() if isinstance(given, dict) else ()
    table = _TABLES.get(re.sub(r"\[\d+\]", "[]", path))
    for key, value in members:
        where = f"{path}.{key}" if path else key
        if table is not None and key not in table.__struct_fields__:
            return where
        found = _unknown_key(value, where)
        if found is not None:
            return found
    for place, value in enumerate(given if isinstance(given, list) else ()):
        found = _unknown_key(value, f"{path}[{place}]")
        if found is not None:
            return found
    return None
