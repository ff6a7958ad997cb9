"""How a run ended, as JSON and for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jigsawrl.cli.summary import conserved, describe, succeeded, summarize, to_line
from jigsawrl.contract.requests import FateCounts
from tests.unit.cli.statuses import FINISHED, status

RUN = Path("/runs/tiny-1")


def test_the_last_line_is_one_json_object_with_the_promised_keys() -> None:
    line = to_line(summarize(status(**FINISHED, num_dead_letters=2), run_folder=RUN))
    assert "\n" not in line
    data = json.loads(line)
    assert (data["run"], data["dead_letters"]) == (str(RUN), 2)
    tiny = data["pipelines"]["tiny"]
    assert (tiny["version"], tiny["eval_before"], tiny["eval_after"]) == (3, 0.5, 0.75)
    assert tiny["tokens_per_s"] == 250.0
    assert tiny["groups"] == {
        "admitted": 7,
        "trained": 6,
        "filtered": 0,
        "stale": 0,
        "discarded": 0,
        "failed": 1,
        "in_flight": 0,
    }


def test_an_evaluation_that_never_ran_is_null() -> None:
    tiny = summarize(status(version=1), run_folder=RUN)["pipelines"]["tiny"]
    assert tiny["eval_before"] is None
    assert tiny["eval_after"] is None
    assert tiny["tokens_per_s"] == 0.0


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (FateCounts(admitted=3, trained=1, stale=1, discarded=1), True),
        (FateCounts(admitted=3, trained=2), False),
        (FateCounts(admitted=3, trained=2, in_flight=1), False),
    ],
)
def test_conservation_needs_one_fate_for_each_and_nothing_in_flight(
    counts: FateCounts, expected: bool
) -> None:
    assert conserved(counts) is expected
    changed = FINISHED | {"sequences": counts}
    assert succeeded(status(**changed).pipelines[0]) is expected


def test_a_failed_pipeline_did_not_succeed() -> None:
    assert not succeeded(status(**(FINISHED | {"state": "failed"})).pipelines[0])


def test_people_read_accuracy_fates_and_dead_letters() -> None:
    text = "\n".join(describe(status(**FINISHED, num_dead_letters=2), run_folder=RUN))
    assert "held-out accuracy: 0.500 (version 0), 0.750 (version 3)" in text
    assert "groups: 7 admitted = 6 trained + 1 failed" in text
    assert "dead letters: 2" in text
    lost = FINISHED | {"groups": FateCounts(admitted=7, trained=6)}
    assert "NOT CONSERVED" in "\n".join(describe(status(**lost), run_folder=RUN))


def test_what_is_in_flight_is_only_lost_where_the_pipeline_has_finished() -> None:
    counts = FateCounts(admitted=7, trained=5, in_flight=2)
    for state, lost in (("running", False), ("failed", False), ("finished", True)):
        changed = FINISHED | {"groups": counts, "state": state}
        text = "\n".join(describe(status(**changed), run_folder=RUN))
        assert "7 admitted = 5 trained + 2 in flight" in text
        assert ("NOT CONSERVED" in text) is lost


def test_ignored_events_are_told_where_there_were_any() -> None:
    text = "\n".join(describe(status(**FINISHED, num_ignored=3), run_folder=RUN))
    assert "events ignored, late or repeated: 3" in text
    assert "ignored" not in "\n".join(describe(status(**FINISHED), run_folder=RUN))
