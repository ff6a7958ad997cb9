"""Which logs `jigsaw logs` shows, and how far."""

from __future__ import annotations

from pathlib import Path

import pytest

from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.log_files import last_lines, put_aside
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


def test_the_end_of_a_long_log_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {i} {'x' * 1000}\n" for i in range(1000)) + "half")
    assert [line[:8] for line in last_lines(path, 100)][:2] == ["line 901", "line 902"]
    assert len(last_lines(path, 5000)) == 1001
    assert last_lines(path, 1) == ["half"]
    assert last_lines(path, 0) == last_lines(tmp_path / "none", 3) == []
    with path.open("r+b") as file:  # the begin is not even there
        file.write(b"\xff" * 1000)
    assert last_lines(path, 2)[-1] == "half"


def test_a_line_that_comes_while_the_last_ones_are_shown_is_followed(folder: Path) -> None:
    path = folder / "logs" / "scheduler.log"
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            with path.open("a") as file:
                file.write("meanwhile\n")
        else:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show_logs(folder, "scheduler", num_lines=2, follow=True, write=write)
    assert lines == ["scheduler | leads", "scheduler | meanwhile"]


def test_a_large_log_is_put_aside_and_the_one_before_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for text in ("first", "second"):
        path.write_text(text)
        put_aside(path, max_bytes=5 if text == "first" else 4)
    assert path.with_name("a.log.1").read_text() == "second"
    path.write_text("tiny")
    put_aside(path, max_bytes=4)
    assert path.read_text() == "tiny"
