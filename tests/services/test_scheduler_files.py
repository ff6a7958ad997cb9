"""What the scheduler keeps for its successor and for replay: segment files and snapshots."""

import os
from pathlib import Path
from random import Random
from typing import Literal

import msgspec
import pytest

from jigsawrl import __version__
from jigsawrl.bus.base import BusError
from jigsawrl.config import InitModelConfig, PipelineConfig, SortDigitsConfig, TrainerConfig
from jigsawrl.config_algorithm import GRPOConfig
from jigsawrl.contract.message import Ref, Worker
from jigsawrl.core.group import Group, Sequence
from jigsawrl.core.scheduler import Scheduler
from jigsawrl.core.state import State, new_pipeline
from services.scheduler.replay import replay
from services.scheduler.segments import Entry, last_written, read_segments, write_segment
from services.scheduler.sizing import (
    STATE_BYTES_PER_GROUP,
    STATE_BYTES_PER_SEQUENCE,
    state_bytes,
)
from services.scheduler.snapshots import (
    Snapshot,
    encode_snapshot,
    newest,
    read_snapshot,
    sequences_on_disk,
    thin_snapshots,
    write_snapshot,
)


def test_segments_are_read_in_order_each_entry_once(tmp_path: Path) -> None:
    entries = [Entry(i, float(i), b"x" * i) for i in range(1, 8)]
    write_segment(tmp_path, entries[:4])
    write_segment(tmp_path, entries[2:])
    write_segment(tmp_path, [])
    assert list(read_segments(tmp_path)) == entries
    assert last_written(tmp_path) == 7


def test_a_replay_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no messages"):
        list(replay(tmp_path))
    write_segment(tmp_path / "events", [Entry(5, 1.0, b"")])
    with pytest.raises(ValueError, match="lacks messages 1 to 4"):
        list(replay(tmp_path))
    with pytest.raises(ValueError, match="no snapshot of message 3; it has none"):
        list(replay(tmp_path, after=3))


def stored(sequence: int, *, code_version: str = __version__, handed_over: bool = False) -> bytes:
    return encode_snapshot(
        Snapshot(sequence=sequence, code_version=code_version, state=b"", handed_over=handed_over)
    )


def test_a_leader_goes_on_from_the_snapshot_of_the_latest_message() -> None:
    found = newest([stored(3), b"\xc1", stored(7), stored(5)], code_version=__version__)
    assert found is not None
    assert found.sequence == 7
    assert newest([], code_version=__version__) is None
    with pytest.raises(BusError, match="no snapshot can be read"):
        newest([b"\xc1"], code_version=__version__)


def test_another_version_takes_over_only_what_was_handed_over() -> None:
    with pytest.raises(BusError, match=r"start 0\.0\.9 once more and stop it with SIGTERM"):
        newest([stored(7, code_version="0.0.9"), stored(5)], code_version=__version__)
    handed = stored(7, code_version="0.0.9", handed_over=True)
    found = newest([stored(5, code_version="0.0.9"), handed], code_version=__version__)
    assert found is not None
    assert found.sequence == 7
    with pytest.raises(BusError, match=r"version 0\.0\.9 .* handed over, but a stored snapshot"):
        newest([b"\xc1", handed], code_version=__version__)


def test_of_old_snapshots_one_per_hour_stays(tmp_path: Path) -> None:
    hour = 1_800_000_000 // 3600
    for number in range(60):  # every 10 minutes, 10 hours long
        write_snapshot(tmp_path, sequence=number + 1, payload=stored(number + 1))
        written_s = hour * 3600 + number * 600
        os.utime(tmp_path / f"{number + 1:020d}.snapshot", (written_s, written_s))
    thin_snapshots(tmp_path)
    assert sequences_on_disk(tmp_path) == [1, 7, 13, 19, 25, 31, 37, *range(41, 61)]
    assert read_snapshot(tmp_path, 37).sequence == 37


def test_a_snapshot_is_compressed_where_it_is_stored() -> None:
    state = b"sequence" * 1_000_000
    payload = encode_snapshot(Snapshot(sequence=1, code_version=__version__, state=state))
    assert len(payload) < len(state) / 6
    found = newest([payload])
    assert found is not None
    assert found.state == state


@pytest.mark.parametrize("group_size", [2, 8, 16])
@pytest.mark.parametrize("stage", ["running", "scored"])
def test_the_bound_of_a_snapshot_holds(
    group_size: int, stage: Literal["running", "scored"]
) -> None:
    """Numbers are random, so that they can't be compressed, and names as long as they may be."""
    random = Random(0)
    name = "p" * 63

    def ref() -> Ref:
        return Ref(f"JIG_DATA_{name}", 1 + random.randrange(1 << 32))

    def sequence(index: int) -> Sequence:
        owner = Worker(
            id=f"{name}.rollout{random.randrange(64)}", boot=f"{random.randrange(1 << 48):x}"
        )
        scored = stage == "scored"
        return Sequence(
            index=index,
            epoch=random.randrange(300),
            stage=stage,
            owner=None if scored else owner,
            since_s=random.random() * 1e6,
            resume=None if scored else ref(),
            record=ref() if scored else None,
            reward=ref() if scored else None,
            score=random.random(),
            min_version=random.randrange(1 << 20),
            max_version=random.randrange(1 << 20),
        )

    def group(number: int) -> Group:
        return Group(
            number=number,
            cursor=random.randrange(1 << 30),
            data_floor=random.randrange(1 << 32),
            sequences=[sequence(index) for index in range(group_size)],
            since_s=random.random() * 1e6,
            prompt=ref(),
        )

    size = msgspec.structs.replace(GRPOConfig(), group_size=group_size)
    config = PipelineConfig(
        name=name,
        model=InitModelConfig(),
        task=SortDigitsConfig(),
        algorithm=size,
        trainer=TrainerConfig(num_steps=1, groups_per_batch=256),
    )
    pipeline = new_pipeline(config.spec(), b"", gang_epoch=0, submissions=[])
    bound = state_bytes(config)
    num_groups = bound // (STATE_BYTES_PER_GROUP + group_size * STATE_BYTES_PER_SEQUENCE)
    pipeline.groups = {number: group(number) for number in range(10**6, 10**6 + num_groups)}
    state = Scheduler(state=State(pipelines={name: pipeline})).snapshot()
    payload = encode_snapshot(Snapshot(sequence=1, code_version=__version__, state=state))
    assert bound / 3 < len(payload) < bound
