"""The servers' configurations: what is shipped is what is generated, and nats-server takes it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from nats_samples import CLUSTER, FOLDER, samples

from jigsawrl.bus.server import find_server
from jigsawrl.bus.server_config import ServerSettings, server_config
from jigsawrl.cli.credentials import make


@pytest.mark.parametrize("name", sorted(samples()))
def test_the_shipped_samples_are_what_is_generated(name: str) -> None:
    again = "python tests/bus/nats_samples.py"
    assert (FOLDER / name).read_text() == samples()[name], f"write it anew: {again}"


def test_the_server_takes_what_the_command_writes(tmp_path: Path) -> None:
    make(tmp_path / "one", group="default")
    make(tmp_path / "three", group="default", cluster=CLUSTER)
    make(tmp_path / "three", group="other")
    found = [*(tmp_path / "one").glob("*.conf"), *(tmp_path / "three").glob("*.conf")]
    assert len(found) == 4
    for path in found:
        done = subprocess.run(
            [find_server(), "-t", "-c", path.name], cwd=path.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_a_single_server_syncs_before_it_acknowledges_and_a_cluster_relies_on_its_copies() -> None:
    assert 'sync_interval: "always"' in samples()["nats-server.conf"]
    for host in CLUSTER:
        assert "sync_interval" not in samples()[f"nats-server-{host}.conf"]


def test_a_plain_server_has_neither_accounts_nor_tls() -> None:
    text = server_config(ServerSettings(store_folder="/a folder"))
    assert "tls" not in text
    assert "accounts" not in text
    assert 'store_dir: "/a folder"' in text
