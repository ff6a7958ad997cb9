"""Submissions and cancellations that come again."""

from jigsawrl.contract import events as e
from jigsawrl.core import invariants
from jigsawrl.core.scheduler import Scheduler
from tests.unit.core.world import spec


def submission(name: str, number: int) -> e.PipelineSubmitted:
    return e.PipelineSubmitted(id=f"submit:{number}", pipeline=name, spec=spec(name), config=b"")


def cancellation(number: int) -> e.PipelineCancelled:
    return e.PipelineCancelled(
        id=f"cancel:{number}", pipeline="p", reason="enough", submission=f"submit:{number}"
    )


def test_a_repeated_submission_brings_no_ended_pipeline_back() -> None:
    scheduler = Scheduler()
    events = [submission("p", 1), cancellation(1), submission("p", 1), e.Tick(id="t")]
    for number, event in enumerate(events, 1):
        scheduler.handle(event, timestamp_s=float(number), sequence=number)
    assert scheduler.state.pipelines["p"].stage == "failed"
    for number, event in enumerate([submission("p", 2), cancellation(2), submission("p", 1)], 5):
        scheduler.handle(event, timestamp_s=float(number), sequence=number)
    assert scheduler.state.pipelines["p"].submissions == ["submit:1", "submit:2"]
    assert not scheduler.state.pipelines["p"].live
    invariants.check(scheduler.state)


def test_a_repeated_cancellation_ends_no_later_pipeline_of_the_name() -> None:
    scheduler = Scheduler()
    events = [submission("p", 1), cancellation(1), submission("p", 2), cancellation(1)]
    for number, event in enumerate(events, 1):
        scheduler.handle(event, timestamp_s=float(number), sequence=number)
    assert scheduler.state.pipelines["p"].live
    scheduler.handle(cancellation(2), timestamp_s=9.0, sequence=9)
    assert not scheduler.state.pipelines["p"].live
    invariants.check(scheduler.state)
