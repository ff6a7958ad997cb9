"""This machine: Python and packages, nats-server, torch, devices, and what dead nodes left behind."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import msgspec

from jigsawrl import __version__
from jigsawrl.bus.base import BusError
from jigsawrl.bus.server import check_version, find_server
from jigsawrl.cli.checks.finding import Finding, failed, ok, warning
from jigsawrl.contract.message import SCHEMA_VERSION
from jigsawrl.devices.cgroups import leftovers
from jigsawrl.devices.cpu import CpuActuator
from jigsawrl.devices.gpus import Gpu, find_gpus

TORCH_TIMEOUT_S = 120.0
"""An import takes seconds, from a cold network disk a minute."""

NEEDED = ("cli", "services", "torch")
"""Extras without which this machine can't run pipelines; the others are for what some of them ask."""

_REQUIREMENT = re.compile(r"([\w.-]+)(?:>=([\d.]+))?[^;]*;.*extra == ['\"](\w+)['\"]")

_ASK_TORCH = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "gpus": names}))
"""


class Torch(msgspec.Struct, frozen=True):
    """What torch says of itself."""

    version: str
    gpus: tuple[str, ...]


def check_machine() -> Iterator[Finding]:
    """All of it."""
    yield ok(
        "python",
        f"Python {platform.python_version()}, JigsawRL {__version__}, schema {SCHEMA_VERSION}",
    )
    yield from check_packages()
    yield check_nats_server()
    yield from check_devices()
    yield check_leftovers()


def check_packages() -> Iterator[Finding]:
    """Of each extra: installed, and new enough."""
    problems: dict[str, list[str]] = {}
    extras: list[str] = []
    for requirement in metadata.requires("jigsawrl") or ():
        match = _REQUIREMENT.match(requirement)
        if match is None or match[3] == "dev":
            continue
        name, least, extra = match[1], match[2], match[3]
        extras += [] if extra in extras else [extra]
        problem = _problem(name, least)
        if problem is not None:
            problems.setdefault(extra, []).append(problem)
    whole = [extra for extra in extras if extra not in problems]
    yield ok("packages", f"complete: {', '.join(whole) or 'none of the extras'}")
    for extra, texts in problems.items():
        found = f"extra {extra}: {', '.join(texts)}"
        if extra in NEEDED:
            remedy = f"pip install 'jigsawrl[{extra}]', unless this machine is a client only"
            yield warning("packages", found, remedy=remedy)
        else:
            yield ok("packages", f"{found} (for pipelines that ask for it)")


def _problem(name: str, least: str | None) -> str | None:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is missing"
    if least is not None and _numbers(version) < _numbers(least):
        return f"{name} {version} is older than {least}"
    return None


def _numbers(version: str) -> list[int]:
    """``2.13.0+cpu`` -> 2, 13, 0: pre-releases count as what they precede."""
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def check_nats_server() -> Finding:
    """Needed where something runs."""
    try:
        program = find_server()
        version = check_version(program)
    except BusError as error:
        found, _, remedy = str(error).rpartition(": ")
        if importlib.util.find_spec("services") is None:
            return warning("nats-server", found, remedy=f"{remedy}, unless it is a client only")
        return failed("nats-server", found, remedy=remedy)
    return ok("nats-server", f"{version} ({program})")


def check_devices() -> Iterator[Finding]:
    """What a node here would register, and whether torch can use it."""
    try:
        gpus = find_gpus(otherwise="use --devices cpu")
    except ValueError as error:
        found, _, remedy = str(error).partition(": ")
        yield failed("devices", found, remedy=remedy)
        gpus = ()
    yield check_torch(gpus)
    cores = sorted(os.sched_getaffinity(0))
    slots = f"{len(cores)} CPU slots (cores {', '.join(map(str, cores))})"
    if gpus:
        listed = ", ".join(f"{gpu.name} with {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in gpus)
        yield ok("devices", f"{len(gpus)} GPUs: {listed}; or, with --devices cpu, {slots}")
    else:
        yield ok("devices", f"no GPU; {slots}")
    mechanism, fell_back = CpuActuator().prospect()
    if fell_back is None:
        yield ok("cpu shares", f"tenants of a CPU slot are weighed by {mechanism}")
    else:
        yield warning(
            "cpu shares",
            fell_back,
            remedy="run where control groups can be written (docs/devices.md), or live with it",
        )


def check_torch(gpus: tuple[Gpu, ...]) -> Finding:
    """In a process of its own: a broken torch may end the one that imports it."""
    if importlib.util.find_spec("torch") is None:
        return warning(
            "torch",
            "not installed: no model can be run here",
            remedy="pip install 'jigsawrl[torch]', unless this machine is a client only",
        )
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
        )
        torch = msgspec.json.decode(asked.stdout, type=Torch)
    except subprocess.TimeoutExpired:
        found = f"torch was not imported within {TORCH_TIMEOUT_S:.0f} s"
        return failed("torch", found, remedy="see why: python -X importtime -c 'import torch'")
    except msgspec.DecodeError:
        last = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        return failed("torch", f"can't be imported: {last}", remedy="install torch again")
    if len(torch.gpus) < len(gpus):
        return failed(
            "torch",
            f"torch {torch.version} sees {len(torch.gpus)} of {len(gpus)} GPUs",
            remedy="install the torch of this driver's CUDA version, or use --devices cpu",
        )
    return ok("torch", f"torch {torch.version}, {len(torch.gpus)} CUDA devices")


def check_leftovers() -> Finding:
    """Control groups."""
    groups = leftovers()
    if not groups:
        return ok("leftovers", "no control groups of dead nodes")
    return warning(
        "leftovers",
        f"{len(groups)} control groups of dead nodes, the first {groups[0]}",
        remedy="the next node that starts here removes them",
    )
