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


def test_a_node_that_joined_from_its_own_folder_has_its_tenants_logs_there(tmp_path: Path) -> None:
    log = tmp_path / "nodes/b/logs/p.rollout0.log"
    log.parent.mkdir(parents=True)
    log.write_text("five\n")
    lines: list[str] = []
    show_logs(tmp_path, "p", num_lines=2, follow=False, write=lines.append)
    assert lines == ["p.rollout0 | five"]


def test_logs_without_a_line_are_told_instead_of_silence(folder: Path) -> None:
    for name in ("p.trainer0", "p.rollout0"):
        (folder / f"node/logs/{name}.log").write_text("")
    lines: list[str] = []
    show_logs(folder, "p", num_lines=2, follow=False, write=lines.append)
    assert lines == ["nothing was written yet by p.rollout0, p.trainer0: they log what goes wrong"]
