"""A daemon and its user, for tests of whole clusters on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.integration.live_run import PIPELINE

WAIT_S = 120.0


class Daemon:
    """The commands of one daemon's user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "daemon"
        self.pipeline = folder / "tiny.toml"
        self.pipeline.write_text(PIPELINE)

    def jigsaw(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "jigsawrl.cli.main", *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"JIGSAW_FOLDER": str(self.folder), "OMP_NUM_THREADS": "1"},
            timeout=WAIT_S,
            check=False,
        )

    def ok(self, *arguments: str) -> str:
        done = self.jigsaw(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *arguments: str) -> str:
        done = self.jigsaw(*arguments)
        assert done.returncode in (1, 2), done
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def status(self, pipeline: str = "tiny") -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.ok("status", pipeline, "--json"))
        return told

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline_s = time.monotonic() + WAIT_S
        while not condition(status := self.status()):
            assert time.monotonic() < deadline_s, status
            time.sleep(0.3)
        return status

    @property
    def pid(self) -> int:
        found: int = json.loads((self.folder / "daemon.json").read_text())["pid"]
        return found

    def processes(self) -> list[psutil.Process]:
        """All that mention its folder."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in " ".join(process.info["cmdline"] or ()):
                found.append(process)
        return found

    def join(self, name: str, *, notice_s: float = 20.0) -> subprocess.Popen[bytes]:
        """A second machine, as far as the cluster can tell."""
        url = json.loads((self.folder / "daemon.json").read_text())["url"]
        log = self.folder / "logs" / f"node-{name}.log"
        command = [sys.executable, "-m", "jigsawrl.cli.main", "node", "--url", url]
        command += ["--folder", str(self.folder), "--name", name, "--devices", "cpu"]
        with log.open("ab") as output:
            return subprocess.Popen(
                [*command, "--notice", str(notice_s)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def end(self) -> None:
        """Whatever a test left."""
        self.jigsaw("down")
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
