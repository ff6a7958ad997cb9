"""Two ranks learn what one rank learns, and stop as one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from services.trainer.parallel import Gang
from tests.unit.trainer import rank_program


def test_two_ranks_agree_with_one(gang: Gang, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, rank_program.__file__, str(rank), "2", str(tmp_path)])
        for rank in range(2)
    ]
    try:
        expected = rank_program.train_all(gang)
        # Long, since each rank imports torch, perhaps beside other tests.
        assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    found = load_file(tmp_path / "weights.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max())
        assert error <= 1e-10 * float(tensor.abs().max()), name
