"""The folder of one run: made new, or opened again to resume; one command at a time works in it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from jigsawrl.cli.config_file import from_json, to_json
from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.profile import DeviceProfile

RUN_FILE = "run.json"
PROFILE_FILE = "profile.json"
"""Where the run was started with a profile: it goes on with that."""

CONFIG_FILE = "config.json"
LOCK_FILE = "lock"
PROBE_S, PROBE_POLL_S = 1.0, 0.01
"""So long a lock waits for those who only ask about it: they hold theirs for microseconds, and may be
frozen meanwhile."""

SYSTEM_FOLDERS = ("logs", "nats", "node", "scheduler")


def make_run_folder(runs_folder: Path, *, pipeline: str, name: str | None) -> Path:
    """``runs/NAME``, or ``runs/PIPELINE-TIME`` with a number where that exists; absolute.

    Raises `CommandError` where `name` exists or nothing can be written."""
    if name is not None and (Path(name).name != name or name in ("", "..")):
        raise CommandError(
            f"--name {name}: give a name, not a path; --runs-folder chooses the place",
            status=EXIT_BAD_INPUT,
        )
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        runs_folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            suffix = "" if number == 1 else f"-{number}"
            folder = runs_folder.resolve() / (name or f"{pipeline}-{stamp}{suffix}")
            try:
                folder.mkdir()
            except FileExistsError:
                if name is not None:
                    raise CommandError(
                        f"{folder} exists: choose another --name", status=EXIT_BAD_INPUT
                    ) from None
            else:
                return folder
    except OSError as error:
        raise CommandError(
            f"can't make a run folder under {runs_folder}: {error.strerror};"
            " choose another --runs-folder",
            status=EXIT_BAD_INPUT,
        ) from None
    raise AssertionError("the count is endless")


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is run: ``run.json``."""

    pipelines: tuple[str, ...]
    """In the order in which they are submitted; each has a folder of its name in the run's."""
    policy: str
    start_together: bool = False


def write_run(
    folder: Path,
    configs: Sequence[PipelineConfig],
    *,
    policy: str,
    start_together: bool,
    profile: DeviceProfile | None = None,
) -> Run:
    """All that `read_run` needs, and a place for logs; raises `CommandError`."""
    reserved = next((c.name for c in configs if c.name in SYSTEM_FOLDERS), None)
    if reserved is not None:
        raise CommandError(
            f"a pipeline can't be called {reserved}: a run has a folder of that name already",
            status=EXIT_BAD_INPUT,
        )
    try:
        for config in configs:
            (folder / config.name).mkdir()
            (folder / config.name / CONFIG_FILE).write_text(to_json(config) + "\n")
        run = Run(
            pipelines=tuple(config.name for config in configs),
            policy=policy,
            start_together=start_together,
        )
        (folder / RUN_FILE).write_bytes(msgspec.json.encode(run) + b"\n")
        if profile is not None:
            (folder / PROFILE_FILE).write_bytes(msgspec.json.encode(profile) + b"\n")
        (folder / "logs").mkdir()
        return run
    except OSError as error:
        raise CommandError(
            f"can't write into {folder}: {error.strerror}; free some space or choose another"
            " --runs-folder",
            status=EXIT_BAD_INPUT,
        ) from None


def read_run(folder: Path) -> tuple[Run, list[PipelineConfig]]:
    """What a run was started with; raises `CommandError` where there is none."""
    path = folder / RUN_FILE
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
        configs = []
        for name in run.pipelines:
            path = folder / name / CONFIG_FILE
            configs.append(from_json(path.read_bytes()))
    except FileNotFoundError:
        raise CommandError(
            f"{folder} is no run folder: it holds no {path.relative_to(folder)}",
            status=EXIT_BAD_INPUT,
        ) from None
    except OSError as error:
        raise CommandError(
            f"{path} can't be read: {error.strerror}", status=EXIT_BAD_INPUT
        ) from None
    except ValueError as error:
        raise CommandError(
            f"{path} is not of this version of JigsawRL ({error}): resume the run with the version"
            " that started it",
            status=EXIT_BAD_INPUT,
        ) from None
    return run, configs


def pipeline_folder(folder: Path, pipeline: str | None) -> Path:
    """Of one pipeline of a run, which may stay unnamed where it is the only one; `folder` may also be
    that folder itself. Raises `CommandError`."""
    if pipeline is None and (folder / CONFIG_FILE).is_file():
        return folder
    run, _ = read_run(folder)
    name = run.pipelines[0] if pipeline is None and len(run.pipelines) == 1 else pipeline
    if name not in run.pipelines:
        known = ", ".join(run.pipelines)
        asked = "--pipeline is missing" if name is None else f"--pipeline {name}: not in this run"
        raise CommandError(f"{asked}; {folder} has {known}", status=EXIT_BAD_INPUT)
    return folder / name


Locking = Callable[[int, int], None]
"""As ``fcntl.flock``."""


def lock(
    folder: Path,
    *,
    holder: str = "jigsaw run",
    remedy: str = "stop it first",
    flock: Locking = fcntl.flock,
) -> int:
    """A lock that ends with this process; raises `CommandError` where another `holder` has it, or the
    disk has no locks."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    deadline_s = time.monotonic() + PROBE_S
    while True:
        try:
            flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                os.close(descriptor)
                raise _no_locks(folder, error) from None
            if _is_only_probed(descriptor, flock) and time.monotonic() < deadline_s:
                time.sleep(PROBE_POLL_S)
                continue
            os.close(descriptor)
            raise CommandError(
                f"another {holder} works in {folder}: {remedy}", status=EXIT_BAD_INPUT
            ) from None


def is_locked(folder: Path, *, flock: Locking = fcntl.flock) -> bool:
    """Somebody has the lock there. Asked with a shared lock, which `lock` does not take for a holder's;
    raises `CommandError` where the disk has no locks."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise _no_locks(folder, error) from None
    finally:
        os.close(descriptor)
    return False


def _is_only_probed(descriptor: int, flock: Locking) -> bool:
    """Those in the way have shared locks: they only ask."""
    try:
        flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    flock(descriptor, fcntl.LOCK_UN)
    return True


def _no_locks(folder: Path, error: OSError) -> CommandError:
    reason = error.strerror or errno.errorcode.get(error.errno or 0, "unknown")
    return CommandError(
        f"the disk of {folder} has no locks ({reason}): give a folder on a local disk, or mount it with"
        " them (Lustre: -o flock; NFS: with lockd)",
        status=EXIT_BAD_INPUT,
    )
