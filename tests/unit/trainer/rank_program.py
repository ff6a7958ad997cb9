"""One rank of `test_ranks`: ``rank_program.py RANK NUM_RANKS FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from jigsawrl.algorithms.logprobs import Filter
from jigsawrl.config import InitModelConfig
from jigsawrl.config_algorithm import GRPOConfig, KLConfig
from jigsawrl.models.init import build_model
from jigsawrl.models.tokenizer import build_tokenizer
from services.trainer.batch import Sample
from services.trainer.parallel import Gang, full_state, join_gang, leave_gang, shard
from services.trainer.spans import Spans
from services.trainer.step import Step, StepSettings

SHAPE = InitModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
)


def sample(index: int) -> Sample:
    length = 5 + index % 4
    mask = torch.arange(length) >= 3
    return Sample(
        group=f"g{index // 3}",
        sequence=f"s{index}",
        num_prompt_tokens=3,
        tokens=(torch.arange(length) * (index + 2)) % 11 + 1,
        logprobs=torch.zeros(length),
        versions=torch.where(mask, 0, -1).int(),
        mask=mask,
        reward=float(index % 3),
        text="",
    )


def train(gang: Gang) -> dict[str, torch.Tensor]:
    """Weights after the two updates of one step."""
    policy, reference = (
        shard(
            build_model(SHAPE, build_tokenizer("0123456789="), seed=seed).double().eval(),
            gang,
            dtype="float32",
        )
        for seed in (0, 1)
    )
    settings = StepSettings(
        algorithm=GRPOConfig(kl=KLConfig(coefficient=0.1)),
        sampling=Filter(),
        max_new_tokens=8,
        max_microbatch_tokens=16,
        num_minibatches=2,
        max_grad_norm=0.5,
    )
    step = Step(
        [sample(index) for index in range(9)],
        policy=policy,
        reference=reference.requires_grad_(False),
        gang=gang,
        settings=settings,
        version=0,
        spans=Spans(),
    )
    step.train(torch.optim.SGD(policy.parameters(), lr=0.1))
    return full_state(policy)


def main(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    gang = join_gang(device, rank=rank, num_ranks=num_ranks, meeting=folder / "meeting")
    state = train(gang)
    if rank == 0:
        save_file(state, folder / "weights.safetensors")
    leave_gang()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
