"""Run folders are new, or opened again by one command at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jigsawrl.cli.config_file import load_config, to_json
from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.run_folder import CONFIG_FILE, lock, make_run_folder, read_config
from tests.unit.cli.files import write_pipeline


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    folders = {make_run_folder(tmp_path / "runs", pipeline="p", name=None) for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.name.startswith("p-") and folder.is_absolute() for folder in folders)


def test_a_name_that_exists_is_refused(tmp_path: Path) -> None:
    make_run_folder(tmp_path, pipeline="p", name="mine")
    with pytest.raises(CommandError, match="mine exists: choose another --name"):
        make_run_folder(tmp_path, pipeline="p", name="mine")


@pytest.mark.parametrize("name", ["../mine", "a/b", "..", ""])
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CommandError, match="not a path"):
        make_run_folder(tmp_path, pipeline="p", name=name)


def test_a_folder_that_can_not_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="choose another --runs-folder"):
        make_run_folder(tmp_path / "file", pipeline="p", name=None)


def test_one_command_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    held = lock(tmp_path)
    with pytest.raises(CommandError, match="another jigsaw run works in") as caught:
        lock(tmp_path)
    assert caught.value.status == 2
    os.close(held)
    os.close(lock(tmp_path))


def test_the_config_of_a_run_is_read_again(tmp_path: Path) -> None:
    config = load_config(write_pipeline(tmp_path))
    (tmp_path / CONFIG_FILE).write_text(to_json(config))
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "is no run folder"),
        ("{", "this version"),
        ('{"name": "p", "new": 1}', "this version"),
    ],
)
def test_what_is_no_run_of_this_version_is_not_resumed(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    if text is not None:
        (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(CommandError, match=reason) as caught:
        read_config(tmp_path)
    assert caught.value.status == 2
