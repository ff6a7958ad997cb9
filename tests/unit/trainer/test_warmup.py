"""Supervised warm-up."""

from __future__ import annotations

import msgspec
import pytest
import torch

from jigsawrl.config import SortDigitsConfig, WarmupConfig
from jigsawrl.models.init import build_model
from jigsawrl.models.tokenizer import build_tokenizer, encode
from jigsawrl.tasks import Task, build_task
from services.trainer.warmup import share_solved, supervised_batch, warm_up
from tests.unit.trainer.conftest import TINY

TOKENIZER = build_tokenizer("0123456789=")
CONFIG = WarmupConfig(target_accuracy=0.5, learning_rate=1e-2, batch_size=64, max_steps=1000)


@pytest.fixture(scope="module")
def task() -> Task:
    return build_task(SortDigitsConfig(min_digits=2, max_digits=3, num_held_out=200), seed=0)


class HeldOut:
    """The held-out problems, as a training stream."""

    def __init__(self, task: Task) -> None:
        self.train = task.held_out


def test_it_stops_near_the_target_and_greedy_decoding_agrees(task: Task) -> None:
    model = build_model(TINY, TOKENIZER, seed=0)
    reports: list[float] = []
    result = warm_up(
        model,
        task=task,
        tokenizer=TOKENIZER,
        config=CONFIG,
        report=lambda num_steps, accuracy: reports.append(accuracy),
    )
    assert 0.5 <= result.accuracy < 0.6
    assert reports[-1] == result.accuracy
    tokens_BT, targets_BT = supervised_batch(
        HeldOut(task),  # type: ignore[arg-type]
        TOKENIZER,
        cursors=range(200),
    )
    with torch.no_grad():
        share = share_solved(model(input_ids=tokens_BT).logits, targets_BT)
    assert 0.35 <= share <= 0.65
    assert share == pytest.approx(greedy_share(model, task))


def greedy_share(model: torch.nn.Module, task: Task) -> float:
    num_right = 0
    for index in range(200):
        problem = task.held_out(index)
        prompt = encode(TOKENIZER, problem.prompt)
        output = model.generate(  # type: ignore[operator]
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=8,
            do_sample=False,
        )
        answer = [*encode(TOKENIZER, problem.fields["answer"]), TOKENIZER.eos_token_id]
        num_right += output[0, len(prompt) :].tolist() == answer
    return num_right / 200


def test_too_few_steps_are_an_error_in_one_line(task: Task) -> None:
    config = msgspec.structs.replace(CONFIG, max_steps=9)
    with pytest.raises(ValueError, match=r"9 steps reached an accuracy of .*; raise max_steps"):
        warm_up(build_model(TINY, TOKENIZER, seed=0), task=task, tokenizer=TOKENIZER, config=config)


def test_only_the_answer_and_its_end_are_taught(task: Task) -> None:
    tokens_BT, targets_BT = supervised_batch(task, TOKENIZER, cursors=range(4))
    for i in range(4):
        problem = task.train(i)
        taught = targets_BT[i][targets_BT[i] >= 0].tolist()
        assert taught == [
            *encode(TOKENIZER, problem.fields["answer"]),
            TOKENIZER.eos_token_id,
        ]
        prompt = encode(TOKENIZER, problem.prompt)
        assert tokens_BT[i, : len(prompt)].tolist() == prompt
