"""The slowdown table and its profile."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.contract.message import SubStageKind
from jigsawrl.core.slowdown import (
    CPU_SLOT,
    MISSING_PAIR_FACTOR,
    SlowdownProfile,
    SlowdownRow,
    SlowdownTable,
    check_profile,
)
from tests.unit.core.graphs import CPU

DECODE_ALONE = SlowdownRow(kind="tail_decode", share=0.5, speed=0.8)
PAIR = SlowdownRow(
    kind="tail_decode", share=0.5, beside="forward_backward", beside_share=0.5, speed=0.6
)


def profile(*rows: SlowdownRow) -> SlowdownProfile:
    return SlowdownProfile(device_kind="gpu", source="test", rows=rows)


def test_a_core_divides_in_time_and_waits_use_none_of_it() -> None:
    assert CPU.speed("prefill", share=0.25) == 0.25
    assert CPU.speed("prefill", share=0.25, beside=("optimizer", 0.75)) == pytest.approx(0.2425)
    assert CPU.speed("tool_wait", share=0.0, beside=("optimizer", 1.0)) == 1.0
    assert CPU.speed("prefill", share=1.0, beside=("tool_wait", 0.0)) == 1.0
    assert CPU.speed("prefill", share=0.0) == 0.0


def test_profiled_points_are_met_and_others_lie_between() -> None:
    table = SlowdownTable(profile(DECODE_ALONE, PAIR))
    assert table.speed("tail_decode", share=0.5) == 0.8
    assert table.speed("tail_decode", share=0.75) == pytest.approx(0.9)
    assert table.speed("tail_decode", share=0.5, beside=("forward_backward", 0.5)) == 0.6
    less = table.speed("tail_decode", share=0.5, beside=("forward_backward", 0.25))
    assert less == pytest.approx(0.7)
    assert table.capacity == pytest.approx(1.6)


def test_an_unknown_pair_is_slow() -> None:
    table = SlowdownTable(profile(PAIR))
    beside = table.speed("prefill", share=0.5, beside=("optimizer", 0.5))
    assert beside == pytest.approx(0.5 * MISSING_PAIR_FACTOR)


def test_each_further_neighbour_slows() -> None:
    speeds = CPU.speeds((("prefill", 0.25), ("optimizer", 0.25), ("bulk_decode", 0.5)))
    assert speeds == pytest.approx((0.25 * 0.97**2, 0.25 * 0.97**2, 0.5 * 0.97**2))


@given(
    st.sampled_from(["tail_decode", "prefill", "forward_backward"]),
    st.floats(0.01, 1),
    st.sampled_from(["tail_decode", "prefill", "forward_backward"]),
    st.floats(0.01, 1),
)
def test_a_speed_is_a_fraction_and_a_neighbour_never_helps(
    kind: SubStageKind, share: float, beside: SubStageKind, beside_share: float
) -> None:
    table = SlowdownTable(profile(DECODE_ALONE, PAIR))
    shared = table.speed(kind, share=share, beside=(beside, beside_share))
    assert 0 < shared <= table.speed(kind, share=share) <= 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"share": 0.0}, "share is above 0"),
        ({"share": 1.5}, "share is above 0"),
        ({"speed": 1.2}, "speed is above 0"),
        ({"speed": float("nan")}, "speed is above 0"),
        ({"kind": "tool_wait"}, "a wait uses no device"),
        ({"beside": "prefill"}, "come together"),
        ({"beside": "prefill", "beside_share": 0.75}, "sum to at most 1"),
        ({"share": 1.0, "speed": 0.9}, "by definition"),
    ],
)
def test_a_bad_row_is_refused_in_one_line(row: dict[str, object], says: str) -> None:
    good = {"kind": "prefill", "share": 0.5, "speed": 0.5}
    bad = msgspec.convert({**good, **row}, SlowdownRow)
    with pytest.raises(ValueError, match=r"^slowdown profile: rows\[1\]") as error:
        check_profile(profile(DECODE_ALONE, bad), device_kind="gpu")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_row_twice_and_a_factor_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="measured twice"):
        check_profile(profile(PAIR, PAIR), device_kind="gpu")
    with pytest.raises(ValueError, match="missing_pair_factor"):
        check_profile(
            SlowdownProfile(device_kind="gpu", source="", missing_pair_factor=0.0),
            device_kind="gpu",
        )
    check_profile(CPU_SLOT, device_kind="cpu")


def test_a_profile_of_another_device_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="run `jigsaw profile` on this machine"):
        check_profile(profile(PAIR), device_kind="cpu")
