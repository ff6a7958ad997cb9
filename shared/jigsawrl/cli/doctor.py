"""`jigsaw doctor`: looks at this machine and at a cluster, and says of each thing that is not as it
should be what to do.

Called by `main`. The checks lie in `checks`, one file for what each of them looks at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from jigsawrl.cli.checks.cluster import check_cluster
from jigsawrl.cli.checks.credentials import check_credentials
from jigsawrl.cli.checks.finding import Finding
from jigsawrl.cli.checks.folder import check_folder
from jigsawrl.cli.checks.machine import check_machine
from jigsawrl.cli.cluster import Address
from jigsawrl.cli.daemon_folder import find
from jigsawrl.cli.errors import EXIT_FAILED, CommandError

WIDTH = max(map(len, ("ok", "warning", "failed")))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """With ``--json``."""

    findings: Sequence[Finding]
    num_warnings: int
    num_failed: int


def doctor(*, target: Address | Path, credentials: Path | None, as_json: bool) -> int:
    """The exit status: 1 where anything failed. The `target` is a cluster, or a daemon's folder: then
    the daemon that is up there, if one is, is looked at, too, with `credentials` or its own."""
    findings = []
    for finding in _findings(target, credentials):
        findings.append(finding)
        if not as_json:
            _tell(finding)
    report = Report(
        findings=findings,
        num_warnings=sum(finding.state == "warning" for finding in findings),
        num_failed=sum(finding.state == "failed" for finding in findings),
    )
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        print(f"{len(findings)} checks: {report.num_failed} failed, {report.num_warnings} warnings")
    return EXIT_FAILED if report.num_failed else 0


def _findings(target: Address | Path, credentials: Path | None) -> Iterator[Finding]:
    """As they come: some take seconds."""
    yield from check_machine()
    address = target if isinstance(target, Address) else None
    if isinstance(target, Path):
        yield from check_folder(target)
        address = _address_of(target, credentials)
    if address is not None and address.credentials is not None:
        yield from check_credentials(address.credentials)
    if address is not None:
        yield from asyncio.run(check_cluster(address))


def _address_of(folder: Path, credentials: Path | None) -> Address | None:
    """Of the daemon that is up there."""
    try:
        daemon = find(folder)
    except (CommandError, OSError):
        return None
    if credentials is None and daemon.credentials is not None:
        credentials = Path(daemon.credentials)
    return Address(daemon.url, credentials)


def _tell(finding: Finding) -> None:
    print(f"{finding.state:<{WIDTH}}  {finding.check}: {finding.found}", flush=True)
    if finding.remedy is not None:
        print(f"{'':<{WIDTH}}  -> {finding.remedy}", flush=True)
