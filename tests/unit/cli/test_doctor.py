"""What `jigsaw doctor` finds, and what it says to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jigsawrl import __version__
from jigsawrl.bus.facts import ServerFacts, StreamFacts
from jigsawrl.cli.checks.cluster import check_cluster, check_server, check_status, check_streams
from jigsawrl.cli.checks.finding import Finding
from jigsawrl.cli.checks.folder import check_folder, processes_of
from jigsawrl.cli.checks.machine import check_machine
from jigsawrl.cli.cluster import Address
from jigsawrl.cli.daemon_folder import Daemon, announce, occupy
from jigsawrl.cli.main import main
from jigsawrl.contract.requests import NodeStatus, Status, WorkerStatus
from jigsawrl.contract.streams import MAX_PAYLOAD_BYTES
from tests.unit.cli.statuses import status

URL = "nats://127.0.0.1:1"

NODE: dict[str, Any] = {
    "node": "node0",
    "state": "up",
    "devices": ("node0/cpu0",),
    "schema_version": 1,
    "code_version": __version__,
    "silent_s": 1.0,
    "clock_skew_s": 0.001,
}


def of(findings: Iterable[Finding], check: str) -> list[Finding]:
    """Those of one check; what is wrong always says what to do."""
    listed = list(findings)
    for finding in listed:
        assert (finding.remedy is None) == (finding.state == "ok")
        assert "\n" not in finding.found + (finding.remedy or "")
    return [finding for finding in listed if finding.check == check]


def states(findings: Iterable[Finding], check: str) -> list[str]:
    return [finding.state for finding in of(findings, check)]


# --- The cluster ---------------------------------------------------------------------------------


def led(**changes: Any) -> Status:
    base: dict[str, Any] = {"code_version": __version__, "policy": "jigsaw"}
    return msgspec.structs.replace(status(), **(base | changes))


def test_a_cluster_that_is_well_is_ok_throughout() -> None:
    found = list(check_status(led(nodes=(NodeStatus(**NODE),))))
    assert {finding.state for finding in found} == {"ok"}
    assert "policy jigsaw" in of(found, "scheduler")[0].found


@pytest.mark.parametrize(
    ("changes", "state", "told"),
    [
        ({"state": "away", "silent_s": 40.0}, "warning", "heard 40.0 s ago"),
        ({"silent_s": 6.0}, "warning", "heard 6.0 s ago"),
        ({"code_version": "0.0.9"}, "warning", "version 0.0.9"),
        ({"state": "left"}, "ok", "left on purpose"),
        (
            {"state": "refused", "refused": "node0 speaks schema 3: upgrade it"},
            "failed",
            "gets no work: node0 speaks schema 3",
        ),
    ],
)
def test_a_node_that_is_not_well_is_named(changes: dict[str, Any], state: str, told: str) -> None:
    nodes = (NodeStatus(**(NODE | changes)), NodeStatus(**(NODE | {"node": "node1"})))
    first, _ = of(check_status(led(nodes=nodes)), "nodes")
    assert (first.state, told in first.found) == (state, True)


def test_a_clock_that_is_off_says_what_it_matters_for() -> None:
    nodes = (NodeStatus(**(NODE | {"clock_skew_s": -7.0})),)
    (clock,) = of(check_status(led(nodes=nodes)), "clock")
    assert clock.found.startswith("the clock of node0 is 7.0 s behind the NATS server's: decisions")
    assert clock.remedy == "let NTP set it"


def test_no_node_and_another_version_are_warnings() -> None:
    found = list(check_status(led(code_version="0.0.9")))
    assert states(found, "scheduler") == ["warning"]
    assert states(found, "nodes") == ["warning"]


def test_a_scheduler_whose_schema_is_too_far_fails() -> None:
    assert states(check_status(led(schema=-1)), "scheduler") == ["failed"]


def test_workers_that_are_lost_or_of_another_version_are_named() -> None:
    def worker(**changes: Any) -> WorkerStatus:
        base: dict[str, Any] = {
            "worker": "tiny.rollout0",
            "role": "rollout",
            "device": None,
            "state": "ready",
            "version": 1,
            "num_held": 0,
            "code_version": __version__,
        }
        return WorkerStatus(**(base | changes))

    def workers(one: WorkerStatus) -> Finding:
        told = led(nodes=(NodeStatus(**NODE),), pipelines=status(workers=(one,)).pipelines)
        (found,) = of(check_status(told), "workers")
        return found

    assert workers(worker()).found == "1 of 1 pipelines"
    assert workers(worker(state="lost")).found == "not heard: tiny.rollout0"
    assert "tiny.rollout0 0.0.9" in workers(worker(code_version="0.0.9")).found
    assert "tiny.rollout0 unknown" in workers(worker(code_version="")).found


def facts(**changes: Any) -> ServerFacts:
    base: dict[str, Any] = {
        "version": "2.11.1",
        "max_payload_bytes": MAX_PAYLOAD_BYTES,
        "without_jetstream": None,
        "clock_skew_s": 0.01,
    }
    return ServerFacts(**(base | changes))


def test_a_server_that_does_is_ok_and_one_that_does_not_says_why() -> None:
    assert {finding.state for finding in check_server(facts(), URL)} == {"ok"}
    assert states(check_server(facts(version="2.10.9"), URL), "nats") == ["failed"]
    (small,) = of(check_server(facts(max_payload_bytes=1 << 20), URL), "max_payload")
    assert (
        small.remedy == f"set max_payload: {MAX_PAYLOAD_BYTES} in its configuration, and restart it"
    )
    (without,) = of(check_server(facts(without_jetstream="no answer"), URL), "jetstream")
    assert without.state == "failed"
    full = facts(num_bytes=96, max_bytes=100)
    assert states(check_server(full, URL), "jetstream") == ["warning"]
    (clock,) = of(check_server(facts(clock_skew_s=30.0), URL), "clock")
    assert clock.found.startswith("the clock of this machine is 30.0 s ahead")


def test_streams_that_are_missing_full_or_lose_messages_are_named() -> None:
    def stream(name: str, **changes: Any) -> StreamFacts:
        base: dict[str, Any] = {"num_messages": 1, "num_bytes": 10, "max_bytes": 100}
        return StreamFacts(name=name, **({"refuses_when_full": True} | base | changes))

    assert states(check_streams((stream("A"), stream("B")), ["A"]), "streams") == ["ok"]
    (missing,) = of(check_streams((stream("B"),), ["A"]), "streams")
    assert (missing.state, missing.found) == ("failed", "missing: A")
    full = check_streams((stream("A", num_bytes=99),), ["A"])
    assert states(full, "streams") == ["warning", "ok"]
    losing = check_streams((stream("A", refuses_when_full=False),), ["A"])
    assert states(losing, "streams") == ["failed", "ok"]


async def test_a_server_that_is_not_there_fails_with_what_to_do() -> None:
    (found,) = await check_cluster(Address(URL, None))
    assert (found.check, found.state) == ("nats", "failed")
    assert found.found.startswith("no NATS server answers at nats://127.0.0.1:1")
    assert found.remedy == "check the address, or start nats-server there"


# --- The folder ----------------------------------------------------------------------------------


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two that say on their command line that they serve the store of the folder."""
    path = str(tmp_path / "nats" / "nats-server.conf")
    code = "import time; print(flush=True); time.sleep(60)"
    started = [
        subprocess.Popen([sys.executable, "-c", code, "-c", path], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_a_folder_that_is_not_there_yet_can_be_made(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "er"
    found = list(check_folder(folder))
    assert [finding.state for finding in found] == ["ok"] * len(found)
    assert "once made" in of(found, "folder")[0].found
    assert "none is up" in of(found, "daemon")[0].found
    assert not folder.exists()


def test_two_servers_on_one_store_fail_and_are_named(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    (found,) = of(check_folder(tmp_path), "processes")
    assert found.state == "failed"
    assert found.found.startswith(f"two daemons share the store of {tmp_path}: 2 of nats-server")
    assert all(str(process.pid) in found.found for process in processes)


def test_what_a_dead_daemon_left_behind_is_named(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    processes[0].kill()
    processes[0].wait()
    (found,) = of(check_folder(tmp_path), "processes")
    assert (found.state, str(processes[1].pid) in found.found) == ("warning", True)
    held = occupy(tmp_path)  # by a daemon that lives, it is none
    assert states(check_folder(tmp_path), "processes") == ["ok"]
    os.close(held)


def test_tenants_are_known_by_the_list_of_their_node(tmp_path: Path) -> None:
    import psutil

    listed = tmp_path / "node" / "processes.json"
    listed.parent.mkdir()
    created_s = psutil.Process(1).create_time()
    groups = [{"pid": 1, "created_s": created_s}, {"pid": 1, "created_s": created_s - 5}]
    listed.write_text(json.dumps(groups))
    assert [(one.pid, one.program) for one in processes_of(tmp_path)] == [(1, "tenant")]
    listed.write_text("{")
    assert processes_of(tmp_path) == []


def test_a_daemon_that_starts_and_one_on_another_machine_are_told_apart(tmp_path: Path) -> None:
    held = occupy(tmp_path)
    assert states(check_folder(tmp_path), "daemon") == ["warning"]
    announce(tmp_path, Daemon(url=URL, pid=1, host="elsewhere"))
    (found,) = of(check_folder(tmp_path), "daemon")
    assert (found.state, "runs on elsewhere" in found.found) == ("warning", True)
    announce(tmp_path, Daemon(url=URL, pid=1))
    assert states(check_folder(tmp_path), "daemon") == ["ok"]
    (tmp_path / "daemon.json").write_text("[]")
    assert states(check_folder(tmp_path), "daemon") == ["failed"]
    os.close(held)


# --- The command ---------------------------------------------------------------------------------


def test_this_machine_can_run_pipelines() -> None:
    found = list(check_machine())
    assert not [finding for finding in found if finding.state == "failed"]
    assert states(found, "torch") == states(found, "nats-server") == ["ok"]
    assert "CPU slots" in of(found, "devices")[0].found
    assert len(of(found, "cpu shares")) == len(of(found, "leftovers")) == 1


def test_it_prints_lines_or_json_and_fails_where_anything_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JIGSAW_URL", raising=False)
    assert main(["doctor", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"ok       python: Python {sys.version_info.major}.")
    assert lines[-1].endswith("warnings")
    assert main(["doctor", "--url", URL, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["num_failed"] == 1
    assert report["findings"][-1]["check"] == "nats"
    assert main(["doctor", "--url", URL, "--folder", str(tmp_path)]) == 2
