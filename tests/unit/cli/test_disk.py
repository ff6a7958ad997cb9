"""A disk that fills is told."""

from pathlib import Path

from jigsawrl.cli.disk import LEAST_FREE_BYTES, Disk


def test_a_full_disk_is_told_once_and_its_end_too() -> None:
    disk = Disk(Path("/runs/tiny-1"))
    assert disk.notice(LEAST_FREE_BYTES) is None
    told = disk.notice(4096)
    assert told is not None
    assert "the disk of /runs/tiny-1 is full (4096 bytes free)" in told
    assert disk.notice(0) is None
    assert disk.notice(1 << 40) == "the disk of /runs/tiny-1 has room again"
    assert disk.notice(0) is not None
