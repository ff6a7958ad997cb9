"""A daemon that others may reach: TLS, a role for every program, and a whole pipeline over it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jigsawrl.cli.credentials import make
from tests.integration.daemon_site import Daemon
from tests.tracker_files import scalars

pytestmark = pytest.mark.slow


def test_a_pipeline_runs_over_tls_with_a_role_for_every_program(
    daemon: Daemon, tmp_path: Path
) -> None:
    make(tmp_path / "credentials", group="red")
    make(tmp_path / "credentials", group="blue")
    credentials = tmp_path / "credentials"
    daemon.ok(
        *("up", "--detach", "--devices", "cpu"),
        *("--listen", "0.0.0.0", "--credentials", str(credentials / "red")),
    )
    url = json.loads((daemon.folder / "daemon.json").read_text())["url"]
    assert url.startswith("tls://127.0.0.1:")
    steps = ("--set", "trainer.num_steps=1")
    daemon.ok("submit", str(daemon.pipeline), "--wait", *steps, "--track", "tensorboard")
    assert daemon.status()["state"] == "finished"
    assert len(daemon.status()["evaluations"]) >= 2
    tracked = scalars(daemon.folder / "runs" / "tiny")
    assert [v for v, tag, _ in tracked if tag == "evaluation/accuracy"] == [0, 1]
    daemon.ok("doctor")
    logs = [*daemon.folder.glob("logs/*.log"), *daemon.folder.glob("node/logs/*.log")]
    assert logs
    for log in logs:
        assert "may not" not in log.read_text(), log
    # From elsewhere, as it were: by address and credentials, or not at all.
    client = str(credentials / "red" / "client.pem")
    for done in (asked(url, "--credentials", client), asked(url, JIGSAW_CREDENTIALS=client)):
        assert "tiny" in done.stdout
        assert not done.stderr
    for arguments, why in (
        ((), "takes TLS with a client certificate only"),
        (("--credentials", str(credentials / "red" / "rollout.pem")), "is for the role rollout"),
        (("--credentials", str(credentials)), "holds several groups"),
    ):
        done = asked(url, *arguments)
        assert done.returncode == 1
        assert why in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    daemon.ok("down")
    assert not daemon.processes()


def asked(url: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`jigsaw status` of a cluster that is somewhere."""
    return subprocess.run(
        [sys.executable, "-m", "jigsawrl.cli.main", "status", "--url", url, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=60,
        check=False,
    )
