"""Run folders are new."""

from __future__ import annotations

from pathlib import Path

import pytest

from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.run_folder import make_run_folder


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
