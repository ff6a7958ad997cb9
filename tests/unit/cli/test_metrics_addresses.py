"""Where a daemon's services are told to serve their metrics."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError
from jigsawrl.cli.main import main
from jigsawrl.cli.metrics_addresses import metrics_addresses, node_metrics_address

ROOT = Path(__file__).parents[3]


def test_nothing_is_served_unless_it_is_asked_for() -> None:
    assert metrics_addresses(None) is None


def test_port_0_is_a_free_one_for_each() -> None:
    assert metrics_addresses("127.0.0.1:0") == ("127.0.0.1:0", "127.0.0.1:0")


def test_the_node_has_the_next_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    addresses = metrics_addresses(f"127.0.0.1:{port}")
    assert addresses == (f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}")


def test_a_machine_that_joins_serves_its_own_where_it_is_told() -> None:
    assert node_metrics_address(None) is None
    assert node_metrics_address("127.0.0.1:0") == "127.0.0.1:0"
    with pytest.raises(CommandError, match=r"^--metrics 9465: "):
        node_metrics_address("9465")


def test_a_port_that_is_taken_is_told_before_a_machine_joins(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--url", "nats://127.0.0.1:1", "--folder", f"{tmp_path}/d", "--metrics", address]
        assert main(["node", *options]) == EXIT_BAD_INPUT
    assert f"--metrics {address}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["9464", "127.0.0.1:65535", "256.0.0.1:9464"])
def test_what_can_not_be_served_is_bad_input(text: str) -> None:
    with pytest.raises(CommandError, match=r"^--metrics ") as caught:
        metrics_addresses(text)
    assert caught.value.status == EXIT_BAD_INPUT


def test_a_port_that_is_taken_is_told_before_anything_starts(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["up", "--folder", f"{tmp_path}/d", "--metrics", address]) == EXIT_BAD_INPUT
    assert f"--metrics {address}: Address already in use" in capsys.readouterr().err


def test_a_log_format_that_is_none_is_told_before_anything_starts(
    tmp_path: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JIGSAW_LOG", "xml")
    assert main(["up", "--folder", f"{tmp_path}/d"]) == EXIT_BAD_INPUT
    assert "JIGSAW_LOG=xml: choose text or json" in capsys.readouterr().err


def test_a_run_refuses_an_address_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(ROOT / "examples" / "sort-digits.toml"), "--runs-folder", str(tmp_path)]
    assert main([*command, "--metrics", "nowhere"]) == 2
    assert "--metrics" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
