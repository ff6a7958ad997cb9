"""Run folders are new, or opened again by one command at a time."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from jigsawrl.cli.config_file import load_config
from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.run_folder import (
    is_locked,
    lock,
    make_run_folder,
    pipeline_folder,
    read_run,
    write_run,
)
from jigsawrl.config import PipelineConfig
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


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_named_with_a_remedy(tmp_path: Path, number: int) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    os.close(lock(tmp_path))
    for ask in (lock, is_locked):
        with pytest.raises(CommandError, match=r"has no locks .*local disk") as caught:
            ask(tmp_path, flock=flock)
        assert caught.value.status == 2


def two(tmp_path: Path) -> list[PipelineConfig]:
    config = load_config(write_pipeline(tmp_path))
    return [config, msgspec.structs.replace(config, name="another")]


def test_a_run_is_read_again_as_it_was_written(tmp_path: Path) -> None:
    write_run(tmp_path, two(tmp_path), policy="unmanaged", start_together=False)
    run, configs = read_run(tmp_path)
    assert (run.pipelines, run.policy) == (("tiny", "another"), "unmanaged")
    assert configs == two(tmp_path)


def test_a_pipeline_of_a_run_is_found_by_name_or_because_it_is_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    write_run(tmp_path / "one", two(tmp_path)[:1], policy="serial", start_together=False)
    assert pipeline_folder(tmp_path / "one", None) == tmp_path / "one" / "tiny"
    assert pipeline_folder(tmp_path / "one" / "tiny", None) == tmp_path / "one" / "tiny"
    (tmp_path / "two").mkdir()
    write_run(tmp_path / "two", two(tmp_path), policy="serial", start_together=False)
    assert pipeline_folder(tmp_path / "two", "another") == tmp_path / "two" / "another"
    with pytest.raises(CommandError, match=r"--pipeline is missing; .* has tiny, another"):
        pipeline_folder(tmp_path / "two", None)
    with pytest.raises(CommandError, match="--pipeline third: not in this run"):
        pipeline_folder(tmp_path / "two", "third")


def test_a_pipeline_does_not_take_the_name_of_a_folder_of_the_run(tmp_path: Path) -> None:
    config = msgspec.structs.replace(load_config(write_pipeline(tmp_path)), name="logs")
    with pytest.raises(CommandError, match="can't be called logs"):
        write_run(tmp_path, [config], policy="serial", start_together=False)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("run.json", None, "is no run folder: it holds no run.json"),
        ("run.json", "{", "run.json is not of this version"),
        ("tiny/config.json", None, "it holds no tiny/config.json"),
        ("tiny/config.json", "{", "config.json is not of this version"),
        ("tiny/config.json", '{"name": "p", "new": 1}', "config.json is not of this version"),
    ],
)
def test_what_is_no_run_of_this_version_is_not_resumed(
    tmp_path: Path, file: str, text: str | None, reason: str
) -> None:
    write_run(tmp_path, two(tmp_path)[:1], policy="serial", start_together=False)
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(CommandError, match=reason) as caught:
        read_run(tmp_path)
    assert caught.value.status == 2
