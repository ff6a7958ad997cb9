"""A `jigsaw run` as a real process on a tiny pipeline, and a recorder of what crosses its bus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import nats
import psutil
from nats.aio.client import Client
from nats.aio.msg import Msg

PIPELINE = """
name = "tiny"

[model]
type = "init"
hidden_size = 64
intermediate_size = 128
num_layers = 2
num_heads = 2
num_kv_heads = 1
max_position_embeddings = 64

[model.warmup]
target_accuracy = 0.3
max_steps = 2000

[task]
type = "sort-digits"
min_digits = 2
max_digits = 3
num_held_out = 50

[rollout.sampling]
max_new_tokens = 8

[algorithm]
group_size = 4

[trainer]
num_steps = 3
groups_per_batch = 4

[trainer.checkpoint]
every = 1

[evaluation]
every = 1
"""
"""Warm-up to a share of solved problems takes a few seconds; a step well under one."""

QUICK = PIPELINE.replace("[model.warmup]\ntarget_accuracy = 0.3\nmax_steps = 2000\n", "")
"""The same without the warm-up: for tests that don't care what is learned."""

NUM_STEPS, GROUPS_PER_BATCH, GROUP_SIZE, NUM_HELD_OUT = 3, 4, 4, 50

ROLES = ("scheduler", "node", "environment", "reward", "rollout", "trainer", "evaluation")

RUN_TIMEOUT_S = 150.0

POLL_S = 0.05


class LiveRun:
    """The process of one `jigsaw run`; a context that leaves nothing behind."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        pipeline: str = PIPELINE,
        others: Sequence[str] = (),
        policy: str | None = None,
        resume: bool = False,
    ) -> None:
        """`others` are pipelines that run beside it. With `resume` it goes on with the run that an
        earlier one left in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.run_folder = folder / "runs" / "run"
        self.folder = self.run_folder / "tiny"
        """Of the pipeline, where it is called so."""
        self._out, self._err = folder / "stdout", folder / "stderr"
        command = [sys.executable, "-m", "jigsawrl.cli.main", "run"]
        if resume:
            command += ["--resume", str(self.run_folder)]
        else:
            for number, text in enumerate((pipeline, *others)):
                path = folder / f"pipeline{number}.toml"
                path.write_text(text)
                command.append(str(path))
            command += ["--runs-folder", str(folder / "runs"), "--name", "run"]
        for override in overrides:
            command += ["--set", override]
        if policy is not None:
            command += ["--policy", policy]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = psutil.Popen(command, stdout=out, stderr=err)

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except psutil.TimeoutExpired:
                self.process.kill()

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def story(self) -> str:
        """Everything that helps to understand a failure."""
        logs = [*self.run_folder.glob("logs/*.log"), *self.run_folder.glob("node/logs/*.log")]
        parts = [f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs]
        return "\n".join([self.stdout[-3000:], self.stderr[-2000:], *parts])

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> int:
        """The exit status."""
        try:
            return int(self.process.wait(timeout_s))
        except psutil.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s} s\n{self.story()}") from None

    def summary(self) -> dict[str, Any]:
        """The last line of standard output."""
        data: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return data

    def tiny(self) -> dict[str, Any]:
        """The pipeline's part of the summary."""
        part: dict[str, Any] = self.summary()["pipelines"]["tiny"]
        return part

    def num_steps_done(self) -> int:
        """Lines of metrics so far."""
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def services(self) -> dict[str, psutil.Process]:
        """Running programs by role; of a program and its own children, the program."""
        found: dict[str, psutil.Process] = {}
        for process in self._descendants():
            try:
                role = role_of(process.cmdline())
            except psutil.Error:
                continue
            if role is not None:
                found.setdefault(role, process)  # parents come before their children
        return found

    def workers(self, role: str) -> dict[str, psutil.Process]:
        """Workers of a role that run, by id."""
        found: dict[str, psutil.Process] = {}
        for process in self._descendants():
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            name = command[command.index("--worker") + 1] if "--worker" in command else ""
            if f".{role}" in name:
                found.setdefault(name, process)
        return found

    def _descendants(self) -> list[psutil.Process]:
        try:
            children: list[psutil.Process] = self.process.children(recursive=True)
        except psutil.Error:
            children = []
        return children

    def until(self, condition: Callable[[], object], timeout_s: float = 90.0) -> None:
        """Wait for something to be true of a run that goes on."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended early\n{self.story()}"
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s\n{self.story()}"
            time.sleep(POLL_S)

    def service(self, role: str) -> psutil.Process:
        """The process of a role, as soon as there is one."""
        self.until(lambda: role in self.services())
        return self.services()[role]

    def url(self) -> str:
        """Of the run's nats-server, from its scheduler's arguments."""
        arguments = self.service("scheduler").cmdline()
        return str(arguments[arguments.index("--url") + 1])

    def kill(self, role: str) -> None:
        """A crash."""
        self.service(role).send_signal(signal.SIGKILL)


def role_of(command: Sequence[str]) -> str | None:
    """Of a ``python -m services.X`` command line; the rollout program has two roles."""
    module = next((part for part in command if part.startswith("services.")), None)
    if module is None:
        return None
    if "--role" in command:
        return command[command.index("--role") + 1]
    return module.removeprefix("services.")


class Recording:
    """Payloads of commands in the order seen, without repeats; of each role its process ids, and the
    arguments of its first process."""

    def __init__(self) -> None:
        self.commands: list[bytes] = []
        self.pids: dict[str, set[int]] = {}
        self.arguments: dict[str, list[str]] = {}
        self._seen: set[bytes] = set()

    async def on_command(self, message: Msg) -> None:
        """A leader that repeats itself repeats the bytes."""
        if message.data not in self._seen:
            self._seen.add(message.data)
            self.commands.append(message.data)


async def record(live: LiveRun, timeout_s: float = RUN_TIMEOUT_S) -> Recording:
    """Watch a run from its first command to its end."""
    recording = Recording()
    client = await subscribe(live.url(), "jig.command.>", recording.on_command)
    deadline_s = time.monotonic() + timeout_s
    while live.process.poll() is None and time.monotonic() < deadline_s:
        for role, process in live.services().items():
            recording.pids.setdefault(role, set()).add(process.pid)
            with contextlib.suppress(psutil.Error):  # it has ended
                recording.arguments.setdefault(role, process.cmdline())
        await asyncio.sleep(POLL_S)
    await client.close()
    return recording


async def subscribe(url: str, subject: str, handler: Any) -> Client:
    """A plain core-NATS subscription: a copy of what passes, beside the system."""

    async def ignore(_: Exception) -> None:
        """The server ends with the run; that is no error of the recorder."""

    client = await nats.connect(url, error_cb=ignore, allow_reconnect=False)
    await client.subscribe(subject, cb=handler)
    await client.flush()
    return client


def conserved(counts: dict[str, int]) -> bool:
    """Nothing in flight, and each admitted id has one fate."""
    fates = sum(counts[name] for name in ("trained", "filtered", "stale", "discarded", "failed"))
    return counts["in_flight"] == 0 and counts["admitted"] == fates


def assert_each_has_one_fate(live: LiveRun, *, num_steps: int) -> None:
    """By id, from what a run left on disk."""
    assert_one_fate_each(live.folder, live.tiny(), num_steps=num_steps)


def assert_one_fate_each(folder: Path, told: dict[str, Any], *, num_steps: int) -> None:
    """By id, from what is on disk: each trained group stands in the trajectories of exactly one version
    of the history that survived, and the fates in the last checkpoint are a partition of all groups,
    and of all sequences, that were admitted. `told`: the counts of a summary or a status."""
    trained: list[int] = []
    for version in range(1, num_steps + 1):
        rows = (folder / "trajectories" / f"v{version}.jsonl").read_text().splitlines()
        names = {json.loads(row)["group"] for row in rows}
        trained += [int(name.rpartition("/g")[2]) for name in names]
    assert len(set(trained)) == len(trained) == told["groups"]["trained"]
    found = folder.glob(f"checkpoints/v{num_steps}-e*/COMMITTED")
    newest = max(found, key=lambda path: int(path.parent.name.rpartition("-e")[2])).parent
    ledger = json.loads((newest / "state.json").read_text())["ledger"]
    assert sorted(_members(ledger["groups"]["trained"])) == sorted(trained)
    for kind, size in (("groups", 1), ("sequences", GROUP_SIZE)):
        members = [i for ranges in ledger[kind].values() for i in _members(ranges)]
        assert sorted(members) == list(range(size * ledger["num_admitted"]))
        counts = {fate: len(_members(ranges)) for fate, ranges in ledger[kind].items()}
        fates = {fate: count for fate, count in told[kind].items() if fate != "admitted"}
        assert {fate: n for fate, n in counts.items() if n} == {f: n for f, n in fates.items() if n}


def _members(ranges: list[list[int]]) -> list[int]:
    """Of half-open ranges."""
    return [i for start, end in ranges for i in range(start, end)]


def run_program(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """``python -m ...`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
