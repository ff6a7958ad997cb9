"""What `jigsaw status` prints."""

from __future__ import annotations

from typing import Any

import msgspec

from jigsawrl.cli.status_text import describe_pipeline, overview, table
from jigsawrl.contract.requests import FateCounts, NodeStatus, WorkerStatus
from tests.unit.cli.statuses import FINISHED, status


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert list(table(("A", "B"), [("long", "x"), ("y", "")])) == ["A     B", "long  x", "y"]


def test_a_line_says_state_step_reward_and_what_is_waited_for() -> None:
    told = status(
        version=2,
        metrics={"reward_mean": 0.25, "staleness_total_mean": 0.5},
        waiting_for=("x", "y"),
    )
    line = list(overview(told))[1]
    assert line.split() == ["tiny", "running", "2/3", "0.25", "0", "0.5", "x;", "1", "more"]


def test_a_failure_stands_in_place_of_waits_and_a_pause_in_place_of_the_state() -> None:
    assert "no room" in list(overview(status(state="failed", failure="no room")))[1]
    assert "paused" in list(overview(status(paused=True)))[1]
    assert "paused" not in list(overview(status(paused=True, state="finished")))[1]


def test_without_pipelines_it_says_how_to_submit_one() -> None:
    nothing = msgspec.structs.replace(status(), pipelines=())
    assert list(overview(nothing)) == ["no pipelines: jigsaw submit PIPELINE.toml"]


def test_one_pipeline_in_full_names_conservation_workers_and_shares() -> None:
    worker = WorkerStatus(
        worker="tiny.rollout0",
        role="rollout",
        device="node0/cpu1",
        state="ready",
        version=2,
        num_held=3,
        share=0.75,
    )
    told = status(groups=FateCounts(admitted=3, trained=2, in_flight=1), workers=(worker,))
    text = "\n".join(describe_pipeline(told.pipelines[0]))
    assert "3 admitted = 2 trained + 1 in flight" in text
    assert "tiny.rollout0  node0/cpu1  75%    ready  2        3" in text


def test_workers_of_a_pipeline_that_has_ended_are_not_shown_as_if_they_lived() -> None:
    finished = status(**FINISHED).pipelines[0]
    assert "tiny.rollout0" not in "\n".join(describe_pipeline(finished))
    running = msgspec.structs.replace(finished, state="running")
    assert "tiny.rollout0" in "\n".join(describe_pipeline(running))


def test_each_node_has_a_line_and_what_is_wrong_with_one_has_another() -> None:
    def lines(**changes: Any) -> list[str]:
        base: dict[str, Any] = {
            "node": "node1",
            "state": "up",
            "devices": (),
            "schema_version": 1,
            "code_version": "1",
            "silent_s": 40.0,
            "clock_skew_s": 0.5,
        }
        told = msgspec.structs.replace(status(), nodes=(NodeStatus(**(base | changes)),))
        return list(overview(told))[2:]

    devices = ("node1/cpu0", "node1/cpu1")
    assert lines(state="left", clock_skew_s=9.0) == []
    assert lines(devices=devices) == [
        "",
        "NODE   STATE  DEVICES                 HEARD",
        "node1  up     node1/cpu0, node1/cpu1  40 s ago",
    ]
    assert lines(state="away")[2:] == ["node1  away   none     40 s ago"]
    assert lines(state="refused", refused="why")[3:] == ["node refused: why"]
    assert lines(clock_skew_s=-9.0)[3].startswith("the clock of node1 is 9.0 s behind")
