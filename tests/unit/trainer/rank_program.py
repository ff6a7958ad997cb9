"""One rank of `test_ranks`: ``rank_program.py RANK NUM_RANKS FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jigsawrl.algorithms.logprobs import Filter
from jigsawrl.config import InitModelConfig
from jigsawrl.config_algorithm import GRPOConfig, KLConfig, PPOConfig, TruncateConfig
from jigsawrl.models.init import build_model
from jigsawrl.models.tokenizer import build_tokenizer
from services.trainer.batch import Sample
from services.trainer.critic import CriticStep, backbone_state, build_critic
from services.trainer.parallel import (
    Gang,
    full_state,
    join_gang,
    leave_gang,
    load_full_state,
    shard,
)
from services.trainer.spans import Spans
from services.trainer.step import Step, StepSettings
from services.trainer.thread import StoppedError

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


def train_all(gang: Gang) -> dict[str, torch.Tensor]:
    """Weights after one step with a reference, and of policy and critic after one with a critic."""
    ppo = PPOConfig(correction=TruncateConfig(level="sequence", cap=1.5), aggregation="prompt_mean")
    return {
        f"{name}/{key}": tensor
        for name, state in (("grpo", train(gang)), ("ppo", train(gang, ppo)))
        for key, tensor in state.items()
    }


def train(gang: Gang, ppo: PPOConfig | None = None) -> dict[str, torch.Tensor]:
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
        algorithm=ppo or GRPOConfig(kl=KLConfig(coefficient=0.1)),
        sampling=Filter(),
        max_new_tokens=8,
        max_microbatch_tokens=16,
        num_minibatches=2,
        max_grad_norm=0.5,
    )
    samples = [sample(index) for index in range(9)]
    critic_step = None
    if ppo is not None:
        critic = make_critic(policy, gang)
        critic_step = CriticStep(
            samples,
            critic=critic,
            optimizer=torch.optim.SGD(critic.parameters(), lr=0.1),
            gang=gang,
            algorithm=ppo,
            max_grad_norm=0.5,
        )
    step = Step(
        samples,
        policy=policy,
        reference=reference.requires_grad_(False) if ppo is None else None,
        gang=gang,
        settings=settings,
        version=0,
        spans=Spans(),
        critic=critic_step,
    )
    step.train(torch.optim.SGD(policy.parameters(), lr=0.1))
    state = full_state(policy)
    if ppo is not None:
        state |= {f"critic/{name}": tensor for name, tensor in full_state(critic).items()}
    return state


def make_critic(policy: Any, gang: Gang) -> Any:
    """With a head that is not 0, so that values differ."""
    critic = build_critic(policy.config.to_json_string(), dtype=torch.float64).eval()
    load_full_state(critic.model, backbone_state(full_state(policy)))
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-1, 1, SHAPE.hidden_size)[None])
    return shard(critic, gang, dtype="float32")


def main(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    gang = join_gang(device, rank=rank, num_ranks=num_ranks, meeting=folder / "meeting")
    state = train_all(gang)
    if rank == 0:
        save_file(state, folder / "weights.safetensors")
    check_stops(gang)
    leave_gang()


def check_stops(gang: Gang) -> None:
    """Where one rank is told to stop all stop, at the same check."""

    def check_own() -> None:
        if gang.rank == 1:
            raise StoppedError

    gang.check_stop(lambda: None)
    try:
        gang.check_stop(check_own)
    except StoppedError:
        return
    sys.exit("went on alone")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
