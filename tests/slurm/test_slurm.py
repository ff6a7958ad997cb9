"""A job under a real Slurm of one machine (`make test-slurm`; root, on Debian)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_run import PIPELINE

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
JIGSAW = Path(sys.executable).parent / "jigsaw"
WAIT_S = 400.0
"""Slurm holds a requeued job back for more than two minutes."""


class Slurm:
    """One machine's, and its user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "JIGSAW": str(JIGSAW),
            "JIGSAW_DEVICES": "cpu",
        }

    def call(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=self._environment,
            cwd=cwd,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def machine(self, action: str) -> None:
        self.call(str(ROOT / "deploy/slurm/one-machine.sh"), action, str(self.folder))

    def state(self, job: str) -> str:
        told = self.call("scontrol", "show", "job", job)
        return told.partition("JobState=")[2].split()[0]


class Job:
    """One submission of the script."""

    def __init__(self, slurm: Slurm, folder: Path, *pipelines: Path) -> None:
        self._slurm, self.folder = slurm, folder
        script = str(ROOT / "deploy/slurm/jigsaw.sbatch")
        told = slurm.call("sbatch", "--parsable", script, *map(str, pipelines), cwd=folder)
        self.id = told.strip()

    @property
    def output(self) -> str:
        path = self.folder / f"slurm-{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def status(self) -> dict[str, Any] | None:
        command = [str(JIGSAW), "status", "tiny", "--json", "--folder"]
        done = subprocess.run(
            [*command, str(self.folder / f"jigsaw-{self.id}")],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        return None if done.returncode else dict(json.loads(done.stdout))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{self._slurm.state(self.id)}: {self.output}"
            time.sleep(0.5)

    def version(self) -> int:
        status = self.status()
        return -1 if status is None else int(status["version"])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    slurm.machine("start")
    yield slurm
    slurm.machine("stop")


def test_a_job_trains_its_pipeline_and_goes_on_after_a_requeue(
    slurm: Slurm, tmp_path: Path
) -> None:
    pipeline = tmp_path / "tiny.toml"
    pipeline.write_text(PIPELINE.replace("num_steps = 3", "num_steps = 30"))
    job = Job(slurm, tmp_path, pipeline)
    job.until(lambda: job.version() >= 4)
    slurm.call("scontrol", "requeue", job.id)
    job.until(lambda: job.version() == -1)
    run = tmp_path / f"jigsaw-{job.id}" / "runs" / "tiny"
    markers = run.glob("checkpoints/v*-e*/COMMITTED")
    reached = max(int(marker.parent.name[1:].partition("-")[0]) for marker in markers)
    assert reached >= 4, "the stop commits what was reached"
    job.until(lambda: job.version() > reached or slurm.state(job.id) == "COMPLETED")
    job.until(lambda: slurm.state(job.id) in ("COMPLETED", "FAILED"))
    assert slurm.state(job.id) == "COMPLETED", job.output
    assert list(run.glob("checkpoints/v30-e*/COMMITTED"))
    trained = [
        json.loads(line)["version"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert trained == list(range(1, 31)), "each step once"


def test_a_pipeline_that_is_not_there_ends_the_job_with_one_line(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, tmp_path / "missing.toml")
    job.until(lambda: slurm.state(job.id) == "FAILED")
    assert "missing.toml can't be read" in job.output
    assert job.output.count("\n") == 1
