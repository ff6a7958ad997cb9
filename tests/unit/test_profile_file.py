"""Profiles that are read from a file, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jigsawrl.profile_file import MAX_BYTES, read_profile

ROW: dict[str, Any] = {"kind": "tail_decode", "share": 0.5, "speed": 0.6}
GOOD: dict[str, Any] = {
    "slowdown": {"device_kind": "cpu", "source": "a test", "rows": [ROW]},
    "tail_sequences": 4,
    "decode_s": [{"num_sequences": 1, "iteration_s": 0.01}],
}


def write(folder: Path, content: object) -> Path:
    path = folder / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def changed(**slowdown: object) -> dict[str, Any]:
    return GOOD | {"slowdown": GOOD["slowdown"] | slowdown}


def test_what_profile_writes_is_read(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path, GOOD), device_kind="cpu")
    assert (profile.tail_sequences, profile.slowdown.rows[0].speed) == (4, 0.6)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "no profile as `jigsaw profile` writes one"),
        ("[]", "no profile as"),
        ({"tail_sequences": 4}, "missing required field `slowdown`"),
        (GOOD | {"tail": 4}, "tail: unknown key"),
        (changed(devicekind="cpu"), "slowdown.devicekind: unknown key"),
        (changed(rows=[{"kind": "prefill", "sped": 1}]), "slowdown.rows[0].sped: unknown key"),
        (changed(rows=[ROW | {"speed": 1.5}]), "rows[0] (tail_decode): speed is above 0"),
        (changed(rows=[ROW | {"speed": 0}]), "rows[0] (tail_decode): speed is above 0"),
        (changed(rows=[ROW | {"kind": "reward_wait"}]), "a wait uses no device"),
        (changed(rows=[ROW, ROW]), "measured twice"),
        (changed(missing_pair_factor=2), "missing_pair_factor is above 0"),
        (changed(device_kind="NVIDIA H1"), "the device here is 'cpu'"),
        (GOOD | {"tail_sequences": 0}, "tail_sequences is at least 1"),
        (GOOD | {"decode_s": [{"num_sequences": 1, "iteration_s": -1}]}, "decode_s[0]"),
        (" " * (MAX_BYTES + 1), f"at most {MAX_BYTES}"),
    ],
)
def test_what_can_not_be_a_profile_is_refused_in_one_line(
    content: object, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the text is looked at below)
        read_profile(path, device_kind="cpu")
    assert str(refused.value).startswith(f"{path}: ")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be read"):
        read_profile(tmp_path / "nowhere.json", device_kind=None)
