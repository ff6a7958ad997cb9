"""What a nats-server lets a role do: the contract's table of access in subjects of NATS and JetStream.

Pure. Used by `server_config`. A role may do what is listed here and nothing else. The name of a
pipeline's stream is one token, which a pattern can't cut: who may read one pipeline's records may read
those of all pipelines of its group, and the cluster's own streams are denied by name instead.
"""

from __future__ import annotations

from typing import NamedTuple

from jigsawrl.contract.access import ACCESS, Access, ServiceRole, askers
from jigsawrl.contract.records import Record, WeightChunk, WeightManifest
from jigsawrl.contract.streams import Subjects

API = "$JS.API"


class Permissions(NamedTuple):
    """Patterns of subjects; what is denied counts more than what is allowed."""

    publish: tuple[str, ...]
    deny_publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_of(role: str) -> str:
    """Where answers to a role go: one of its own, so that none reads another's."""
    return f"_INBOX.{role}"


def permissions(role: ServiceRole, subjects: Subjects) -> Permissions:
    """Of one role, in the account of its group."""
    access = ACCESS[role]
    publish: list[str] = []
    for event in access.events:
        publish.append(f"{subjects.prefix}.event.*.{event.tag()}")
    for record in access.records:
        publish += _record_subjects(record, subjects)
    for target in access.asks:
        publish.append(_target_subject(target, subjects))
    for target in access.answers:
        publish += [f"{inbox_of(asker)}.>" for asker in askers(target)]
    if access.tells:
        publish += [f"{subjects.prefix}.telemetry.*.*", f"{subjects.prefix}.dead.*.*"]
    publish += _stream_subjects(access, subjects)
    subscribe = [f"{inbox_of(role)}.>"]
    subscribe += [_target_subject(target, subjects) for target in access.answers]
    if access.watches:
        subscribe += [f"{subjects.prefix}.telemetry.>", f"{subjects.prefix}.event.>"]
    return Permissions(
        publish=tuple(dict.fromkeys(publish)),
        deny_publish=() if access.leads else _denied(access, subjects),
        subscribe=tuple(subscribe),
    )


def _record_subjects(record: type[Record], subjects: Subjects) -> list[str]:
    if record is WeightManifest:
        return [f"{subjects.weights_of_version('*', '*', '*')}.{record.tag()}"]
    if record is WeightChunk:
        return [f"{subjects.weights_of_version('*', '*', '*')}.*.{record.tag()}"]
    return [f"{subjects.prefix}.data.*.{record.tag()}"]


def _target_subject(target: str, subjects: Subjects) -> str:
    return subjects.request(target if target in ("scheduler", "status") else f"*.{target}")


def _stream_subjects(access: Access, subjects: Subjects) -> list[str]:
    """Of JetStream's API."""
    if access.leads:
        return [
            f"{subjects.prefix}.command.>",
            *subjects.snapshots_stream().subjects,
            f"$KV.{subjects.lease_bucket()}.>",
            f"{API}.>",
        ]
    found: list[str] = []
    if access.takes_commands:
        stream = subjects.commands_stream().name
        found += [
            f"{API}.CONSUMER.CREATE.{stream}.>",
            f"{API}.CONSUMER.INFO.{stream}.*",
            f"{API}.CONSUMER.MSG.NEXT.{stream}.*",
            f"$JS.ACK.{stream}.>",
        ]
    if access.reads_records or access.reads_weights:
        found += [f"{API}.DIRECT.GET.*", f"{API}.STREAM.MSG.GET.*", f"{API}.STREAM.INFO.*"]
    if access.reads_weights:
        found += [f"{API}.CONSUMER.CREATE.*.*.{subjects.prefix}.weights.>"]
        found += [f"{API}.CONSUMER.MSG.NEXT.*.*"]
    if access.inspects:
        found += [f"{API}.INFO", f"{API}.STREAM.LIST", f"{API}.STREAM.INFO.*"]
        found += [f"{API}.DIRECT.GET.{subjects.dead_letters_stream().name}"]
    if access.keeps_weights:
        found += [f"{API}.DIRECT.GET.*.{subjects.prefix}.weights.>", f"{API}.STREAM.PURGE.*"]
    return found


def _denied(access: Access, subjects: Subjects) -> tuple[str, ...]:
    """What the patterns for streams of pipelines would let through of the cluster's own."""
    names = [spec.name for spec in subjects.cluster_streams()] + [f"KV_{subjects.lease_bucket()}"]
    denied: list[str] = []
    for name in names:
        if access.reads_records or access.reads_weights:
            denied += [f"{API}.DIRECT.GET.{name}", f"{API}.STREAM.MSG.GET.{name}"]
            denied += [f"{API}.STREAM.INFO.{name}"]
        if access.reads_weights and name != subjects.commands_stream().name:
            denied.append(f"{API}.CONSUMER.MSG.NEXT.{name}.*")
        if access.keeps_weights:
            denied.append(f"{API}.STREAM.PURGE.{name}")
    return tuple(denied)
