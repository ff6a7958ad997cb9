"""How ranks meet and part, each a thread here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.trainer.meeting import Meeting
from services.trainer.thread import StoppedError


def meetings(run: Path, gang_epoch: int = 1) -> list[Meeting]:
    return [
        Meeting(run_folder=run, gang_epoch=gang_epoch, rank=rank, num_ranks=2) for rank in range(2)
    ]


def never() -> None:
    pass


def test_others_wait_until_rank_0_opens_and_what_older_gangs_left_goes(tmp_path: Path) -> None:
    meetings(tmp_path)[0].open()
    first, second = meetings(tmp_path, gang_epoch=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.wait, never)
        first.open()
        waiting.result(timeout=5)
    assert [path.name for path in (tmp_path / "gang").iterdir()] == ["e2"]
    assert second.file == first.file


def test_one_that_waits_hears_that_it_is_told_to_stop(tmp_path: Path) -> None:
    def stop() -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        meetings(tmp_path)[1].wait(stop)


@pytest.mark.parametrize(("versions", "agreed"), [((3, 3), True), ((3, 4), False)])
def test_ranks_that_stop_agree_where_they_hold_one_version(
    tmp_path: Path, versions: tuple[int, int], agreed: bool
) -> None:
    both = meetings(tmp_path)
    both[0].open()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(Meeting.agree_to_stop, both, versions))
    assert found == [agreed, agreed]


def test_one_that_stops_alone_gives_up_and_takes_its_word_back(tmp_path: Path) -> None:
    first, second = meetings(tmp_path)
    first.open()
    assert not first.agree_to_stop(3, timeout_s=0.05)
    assert not second.agree_to_stop(3, timeout_s=0.05)
