"""Admission against AReaL's rule, written out as its paper has it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.core.admission import admit, capacity
from jigsawrl.core.group import Group
from jigsawrl.core.ledger import ledger_after
from jigsawrl.core.state import Cut, Pipeline, new_pipeline
from tests.unit.core.world import asynchronous

NUM_STEPS = 1000


def allowed(num_submitted: int, *, batch: int, version: int, eta: int) -> bool:
    """AReaL (arXiv:2505.24298): floor((N - 1) / B) <= i + eta, N the number of groups submitted so far,
    this one included, i the version, B groups in a batch, eta the greatest staleness."""
    return (num_submitted - 1) // batch <= version + eta


def running(batch: int, version: int, eta: int) -> Pipeline:
    """A pipeline at a version, everything up to it trained."""
    spec = asynchronous(eta, groups_per_batch=batch, num_steps=NUM_STEPS)
    pipeline = new_pipeline(spec, b"", gang_epoch=0)
    pipeline.version, pipeline.stage = version, "running"
    pipeline.num_admitted = pipeline.next_cursor = version * batch
    return pipeline


def cut(pipeline: Pipeline, groups: list[Group]) -> None:
    """As `batching` does once they are complete."""
    assert pipeline.version is not None
    for group in groups:
        del pipeline.groups[group.number]
    ledger = ledger_after(pipeline, groups, cursor=pipeline.next_cursor)
    pipeline.cuts = [
        Cut(version=pipeline.version, groups=groups, ledger=ledger, substages={}, rollout_s=0.0)
    ]


@given(
    batch=st.integers(1, 5),
    version=st.integers(0, 7),
    eta=st.integers(0, 4),
    num_ended=st.lists(st.integers(0, 6), max_size=6),
    open_cut=st.booleans(),
)
def test_as_many_groups_are_admitted_as_areals_rule_allows(
    batch: int, version: int, eta: int, num_ended: list[int], open_cut: bool
) -> None:
    pipeline = running(batch, version, eta)
    num_gone = 0
    for number in [0, *num_ended]:
        gone = list(pipeline.groups)[
            :number
        ]  # failed, filtered or stale: AReaL takes them out of N
        for group in gone:
            del pipeline.groups[group]
        num_gone += len(gone)
        if open_cut and len(pipeline.groups) >= batch and pipeline.open_cut is None:
            cut(pipeline, list(pipeline.groups.values())[:batch])
        submitted = pipeline.num_admitted - num_gone
        room = 0
        while allowed(submitted + room + 1, batch=batch, version=version, eta=eta):
            room += 1
        assert capacity(pipeline) == room
        admit(pipeline)
        assert capacity(pipeline) == 0
    assert pipeline.num_admitted - num_gone == (version + eta + 1) * batch


@given(batch=st.integers(1, 5), eta=st.integers(0, 4), num_left=st.integers(0, 5))
def test_nothing_is_admitted_beyond_the_last_step(batch: int, eta: int, num_left: int) -> None:
    pipeline = running(batch, NUM_STEPS - num_left, eta)
    assert capacity(pipeline) == batch * min(num_left, eta + 1)
