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
from jigsawrl.cli.checks.finding import Finding
from jigsawrl.cli.checks.folder import check_folder
from jigsawrl.cli.checks.machine import check_machine
from jigsawrl.cli.daemon_folder import find
from jigsawrl.cli.errors import EXIT_FAILED, CommandError

WIDTH = max(map(len, ("ok", "warning", "failed")))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """With ``--json``."""

    findings: Sequence[Finding]
    num_warnings: int
    num_failed: int


def doctor(*, folder: Path | None, url: str | None, as_json: bool) -> int:
    """The exit status: 1 where anything failed. With a `url` that cluster is looked at, else the daemon
    of `folder`, if one is up there, and the folder."""
    findings = []
    for finding in _findings(folder, url):
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


def _url_of(folder: Path) -> str | None:
    try:
        return find(folder).url
    except (CommandError, OSError):
        return None


def _findings(folder: Path | None, url: str | None) -> Iterator[Finding]:
    """As they come: some take seconds."""
    yield from check_machine()
    if folder is not None:
        yield from check_folder(folder)
        url = url or _url_of(folder)
    if url is not None:
        yield from asyncio.run(check_cluster(url))


def _tell(finding: Finding) -> None:
    print(f"{finding.state:<{WIDTH}}  {finding.check}: {finding.found}", flush=True)
    if finding.remedy is not None:
        print(f"{'':<{WIDTH}}  -> {finding.remedy}", flush=True)
