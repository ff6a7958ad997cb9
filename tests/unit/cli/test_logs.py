"""Which logs `jigsaw logs` shows, and how far."""

from __future__ import annotations

from pathlib import Path

import pytest

from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.logs import show_logs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (
        ("logs/scheduler.log", "leads\n"),
        ("node/logs/p.trainer0.log", "one\ntwo\nthree\n"),
        ("node/logs/p.rollout0.log", "four\n"),
        ("node/logs/pq.rollout0.log", "other\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("p", ["p.rollout0 | four", "p.trainer0 | two", "p.trainer0 | three"]),
        ("p.rollout0", ["p.rollout0 | four"]),
        ("scheduler", ["scheduler | leads"]),
    ],
)
def test_a_name_is_a_pipeline_a_worker_or_a_program(
    folder: Path, name: str, shown: list[str]
) -> None:
    lines: list[str] = []
    assert show_logs(folder, name, num_lines=2, follow=False, write=lines.append) == 0
    assert lines == shown


def test_a_name_without_a_log_is_answered_with_those_there_are(folder: Path) -> None:
    with pytest.raises(CommandError, match=r"no log of x in .*; there are: .*p\.trainer0"):
        show_logs(folder, "x", num_lines=2, follow=False)
    with pytest.raises(CommandError, match="no logs in"):
        show_logs(folder / "nowhere", None, num_lines=2, follow=False)
