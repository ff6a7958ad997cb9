"""How a daemon on this machine is found, and kept from being two."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from jigsawrl.cli.daemon import detach, down
from jigsawrl.cli.daemon_folder import (
    Daemon,
    announce,
    default_folder,
    find,
    is_occupied,
    occupy,
    withdraw,
)
from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.file_systems import network_file_system
from jigsawrl.cli.main import main

UP = Daemon(url="nats://127.0.0.1:1", pid=os.getpid())


def test_a_daemon_is_found_while_it_holds_the_lock(tmp_path: Path) -> None:
    held = occupy(tmp_path)
    with pytest.raises(CommandError, match="no daemon is up"):
        find(tmp_path)
    announce(tmp_path, UP)
    assert find(tmp_path) == UP
    os.close(held)  # as when it is killed: the file stays
    with pytest.raises(CommandError, match="no daemon is up"):
        find(tmp_path)
    withdraw(tmp_path)
    withdraw(tmp_path)


def test_a_second_daemon_in_a_folder_is_refused(tmp_path: Path) -> None:
    held = occupy(tmp_path)
    with pytest.raises(CommandError, match=r"another daemon works in .*jigsaw down"):
        occupy(tmp_path)
    os.close(held)
    os.close(occupy(tmp_path))


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    os.close(occupy(tmp_path))
    (tmp_path / "daemon.json").write_text("[]")
    with pytest.raises(CommandError, match=r"daemon\.json can't be read"):
        find(tmp_path)


def test_the_folder_is_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    monkeypatch.delenv("JIGSAW_FOLDER", raising=False)
    assert default_folder() == Path("/state/jigsaw")
    monkeypatch.setenv("JIGSAW_FOLDER", "/mine")
    assert default_folder() == Path("/mine")


def test_a_network_disk_is_known_by_its_innermost_mount(tmp_path: Path) -> None:
    mounts = write_mounts(tmp_path)
    assert network_file_system(tmp_path / "a" / "b", mounts=mounts) == "nfs4"
    assert network_file_system(tmp_path / "a" / "local", mounts=mounts) is None
    assert network_file_system(Path("/"), mounts=mounts) is None
    assert network_file_system(Path("/"), mounts=tmp_path / "none") is None


def test_a_store_that_another_machine_may_serve_is_refused_on_a_network_disk(
    tmp_path: Path,
) -> None:
    folder, mounts = tmp_path / "a", write_mounts(tmp_path)
    os.close(occupy(folder, mounts=mounts))
    announce(folder, Daemon(url="nats://127.0.0.1:1", pid=1, host="elsewhere"))
    os.close(occupy(folder))  # no network disk: the lock is enough
    with pytest.raises(CommandError, match=r"on elsewhere, and on nfs4 .*run jigsaw down there"):
        occupy(folder, mounts=mounts)
    withdraw(folder)
    os.close(occupy(folder, mounts=mounts))


def write_mounts(folder: Path) -> Path:
    """As the kernel lists them: the folder's ``a`` comes from a server, ``a/local`` does not."""
    path = folder / "mounts"
    path.write_text(
        f"/dev/sda / ext4 rw 0 0\nserver:/x {folder}/a nfs4 rw 0 0\n"
        f"/dev/sdb {folder}/a/local xfs rw 0 0\n"
    )
    return path


def test_a_daemon_of_another_machine_is_not_ended_here(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    held = occupy(tmp_path)  # as where locks are seen across machines
    announce(tmp_path, Daemon(url="nats://127.0.0.1:1", pid=bystander.pid, host="elsewhere"))
    with pytest.raises(CommandError, match=r"runs on elsewhere .*run jigsaw down there"):
        down(tmp_path)
    os.close(held)
    with pytest.raises(CommandError, match="runs on elsewhere"):  # as where they are not
        down(tmp_path)
    bystander.communicate(b"\n")
    assert bystander.returncode == 0


def test_a_dead_daemons_process_number_is_left_alone(tmp_path: Path) -> None:
    os.close(occupy(tmp_path))
    announce(tmp_path, UP)  # the number is this process's by now
    with pytest.raises(CommandError, match="no daemon is up"):
        down(tmp_path)


def test_a_daemon_that_does_not_come_up_in_time_is_ended(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="was not up after 0 s, and was ended"):
        detach(tmp_path, timeout_s=0.0)
    commands = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]


def test_down_waits_for_a_daemon_that_already_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = occupy(tmp_path)  # and it has withdrawn
    threading.Timer(0.2, os.close, [held]).start()
    assert down(tmp_path) == 0
    assert capsys.readouterr().out == f"down: {tmp_path}\n"
    assert not is_occupied(tmp_path)


def test_who_asks_whether_a_daemon_is_up_keeps_none_from_starting(tmp_path: Path) -> None:
    os.close(occupy(tmp_path))
    asking = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(asking, fcntl.LOCK_SH)  # as `is_occupied` does for a moment
    assert not is_occupied(tmp_path)
    threading.Timer(0.1, os.close, [asking]).start()
    held = occupy(tmp_path)
    assert is_occupied(tmp_path)
    os.close(held)


def test_a_folder_that_is_named_goes_before_an_address_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JIGSAW_URL", "nats://127.0.0.1:1")
    assert main(["status", "--folder", str(tmp_path)]) == 1
    assert f"no daemon is up in {tmp_path}" in capsys.readouterr().err
    assert main(["status", "--folder", str(tmp_path), "--url", "nats://127.0.0.1:1"]) == 2
    assert "--url or --folder, not both" in capsys.readouterr().err


def test_a_daemon_of_another_machine_that_listens_to_itself_is_not_asked_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = occupy(tmp_path)
    announce(tmp_path, Daemon(url="nats://127.0.0.1:1", pid=1, host="another-machine"))
    assert main(["status", "--folder", str(tmp_path)]) == 2
    assert "the daemon runs on another-machine" in capsys.readouterr().err
    os.close(held)
