"""What `jigsaw status` prints."""

from __future__ import annotations

from typing import Any

import msgspec

from jigsawrl.cli.status_text import describe_pipeline, overview, table
from jigsawrl.contract.requests import FateCounts, NodeStatus, WorkerStatus
from tests.unit.cli.statuses import status


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert list(table(("A", "B"), [("long", "x"), ("y", "")])) == ["A     B", "long  x", "y"]


def test_a_line_says_state_step_reward_and_what_is_waited_for() -> None:
    told = status(
        version=2,
        metrics={"reward_mean": 0.25, "staleness_total_mean": 0.5},
        waiting_for=("x", "y"),
    )
    line = list(overview(told))[1]
    assert line.split() == ["tiny", "running", "2/3", "0.25", "0", "0.5", "x", "and", "1", "more"]


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


def test_nodes_are_named_that_are_refused_away_or_off_in_time() -> None:
    def line(**changes: Any) -> str:
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
        return "\n".join(list(overview(told))[2:])

    assert line() == line(state="left", clock_skew_s=9.0) == ""
    assert line(state="away") == "node node1 is away, not heard for 40 s"
    assert line(state="refused", refused="why") == "node refused: why"
    assert line(clock_skew_s=-9.0).startswith("the clock of node1 is 9.0 s behind")
