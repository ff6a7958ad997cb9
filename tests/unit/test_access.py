"""The table of access: complete over the contract, and what it lets each role do."""

from __future__ import annotations

from typing import get_args

import pytest

from jigsawrl.bus.permissions import inbox_of, permissions
from jigsawrl.contract.access import ACCESS, ServiceRole, Target, askers
from jigsawrl.contract.events import EventType
from jigsawrl.contract.message import Role
from jigsawrl.contract.records import DeadLetter, RecordType
from jigsawrl.contract.streams import Subjects

SUBJECTS = Subjects()


def roles() -> set[str]:
    service, tenant = get_args(ServiceRole)
    return set(get_args(service)) | set(get_args(tenant))


def test_every_role_has_a_row() -> None:
    assert set(ACCESS) == roles()
    assert set(get_args(Role)) < set(ACCESS)


def test_every_event_and_record_has_somebody_who_may_publish_it() -> None:
    events = {event for access in ACCESS.values() for event in access.events}
    assert events == set(get_args(EventType))
    records = {record for access in ACCESS.values() for record in access.records}
    assert records | {DeadLetter} == set(get_args(RecordType))


def test_every_target_of_requests_is_answered_by_one_role_and_asked_by_some() -> None:
    for target in get_args(Target):
        answering = [role for role, access in ACCESS.items() if target in access.answers]
        assert answering == ["scheduler" if target == "status" else target]
        assert askers(target)


@pytest.mark.parametrize("role", sorted(ACCESS))
def test_answers_go_to_inboxes_that_the_role_alone_reads(role: ServiceRole) -> None:
    mine = f"{inbox_of(role)}.>"
    readers = [other for other in ACCESS if mine in permissions(other, SUBJECTS).subscribe]
    assert readers == [role]


@pytest.mark.parametrize("role", sorted(ACCESS))
def test_no_role_but_the_scheduler_may_touch_a_subject_of_all_kinds(role: ServiceRole) -> None:
    allowed = permissions(role, SUBJECTS)
    for pattern in (">", "jig.>", "$JS.>", "_INBOX.>"):
        assert pattern not in allowed.publish + allowed.subscribe
    if role != "scheduler":
        assert "$JS.API.>" not in allowed.publish


def test_a_client_publishes_nothing_but_questions_and_what_reads_streams() -> None:
    publish = permissions("client", SUBJECTS).publish
    assert [subject for subject in publish if not subject.startswith("$JS.API.")] == [
        SUBJECTS.request("scheduler")
    ]


def test_who_reads_records_of_pipelines_reads_no_stream_of_the_cluster() -> None:
    denied = permissions("rollout", SUBJECTS).deny_publish
    for spec in SUBJECTS.cluster_streams():
        assert f"$JS.API.DIRECT.GET.{spec.name}" in denied
