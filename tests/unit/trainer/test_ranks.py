"""Two ranks learn what one rank learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

PROGRAM = Path(__file__).parent / "rank_program.py"


def run_ranks(num_ranks: int, folder: Path) -> dict[str, torch.Tensor]:
    """Weights after two updates of one step, by rank 0."""
    folder.mkdir()
    ranks = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(rank), str(num_ranks), str(folder)])
        for rank in range(num_ranks)
    ]
    assert [rank.wait(timeout=90) for rank in ranks] == [0] * num_ranks
    weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return weights


def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    one, two = (run_ranks(n, tmp_path / str(n)) for n in (1, 2))
    assert one.keys() == two.keys()
    for name, expected in one.items():
        error = float((two[name] - expected).abs().max())
        assert error <= 1e-10 * float(expected.abs().max()), name
