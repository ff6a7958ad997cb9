"""What holds for every actuator: sums, levels, what is reported."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jigsawrl.devices.base import Actuator, Capability, check_shares
from jigsawrl.devices.cpu import CpuActuator
from jigsawrl.devices.simulated import SimulatedActuator
from jigsawrl.devices.undivided import UndividedActuator


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": 0.75, "b": 0.5}, "n/cpu0: shares sum to 1.25, more than the device: a 0.75, b 0.5"),
        ({"a": -0.1}, "n/cpu0: share -0.1 of a is not between 0 and 1"),
        ({"a": 1.5}, "n/cpu0: share 1.5 of a is not between 0 and 1"),
        ({"a": math.nan}, "share nan of a"),
    ],
)
def test_what_is_no_division_is_refused_by_all(
    shares: dict[str, float], message: str, tmp_path: Path
) -> None:
    actuators: list[Actuator] = [
        SimulatedActuator(),
        UndividedActuator("cuda"),
        CpuActuator(root=tmp_path),
    ]
    for actuator in actuators:
        with pytest.raises(ValueError, match=message):
            actuator.apply("n/cpu0", {tenant: (1, share) for tenant, share in shares.items()})


@pytest.mark.parametrize("count", [1, 3, 7, 49])
def test_equal_parts_are_a_division_for_any_number(count: int) -> None:
    check_shares("n/cpu0", {str(index): 1 / count for index in range(count)})


def test_simulated_gives_and_remembers_what_was_asked() -> None:
    actuator = SimulatedActuator()
    applied = actuator.apply("n/cpu0", {"a": (1, 0.7), "b": (2, 0.3)})
    assert applied.shares == {"a": 0.7, "b": 0.3}
    assert applied.mechanism == "simulated"
    actuator.apply("n/cpu0", {"b": (2, 0.5)})
    assert actuator.divided == {"n/cpu0": {"b": (2, 0.5)}}
    actuator.restore()
    assert (actuator.divided, actuator.num_restored) == ({}, 1)


def test_simulated_keeps_to_the_levels_of_its_capability() -> None:
    levels = Capability(levels=(0.25, 0.5, 0.75, 1.0), change="restart", latency_s=3.0)
    actuator = SimulatedActuator(levels)
    applied = actuator.apply("n/cuda0", {"a": (1, 0.7), "b": (2, 0.3)})
    assert applied.shares == {"a": 0.5, "b": 0.25}
    assert actuator.capability.change == "restart"


def test_what_is_not_divided_is_reported_as_turns() -> None:
    applied = UndividedActuator("cuda").apply("n/cuda0", {"a": (1, 0.9), "b": (2, 0.1)})
    assert applied.shares == {"a": 0.5, "b": 0.5}
    assert "cuda" in (applied.fell_back or "")


def test_cpu_takes_any_share_and_changes_it_live() -> None:
    assert CpuActuator.capability.levels is None
    assert CpuActuator.capability.change == "live"
