"""The exported model is the one that was evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jigsawrl.config import PipelineConfig, SortDigitsConfig
from jigsawrl.tasks import build_task
from services.rollout.build import build_engine
from services.rollout.engine.base import SequenceStart
from tests.integration.conftest import FinishedRun
from tests.integration.live_run import NUM_HELD_OUT, run_program

pytestmark = pytest.mark.slow


NUM_PROBLEMS = 500
TIE = 1e-4
"""Between the two largest logits: there the two implementations may choose differently."""


@pytest.fixture(scope="module")
def exported(finished: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run's model, as `jigsaw export` writes it."""
    target = tmp_path_factory.mktemp("export") / "model"
    run_folder = finished.live.run_folder
    done = run_program("jigsawrl.cli.main", "export", str(run_folder), "--to", str(target))
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def config(finished: FinishedRun) -> PipelineConfig:
    """As the run saved it."""
    payload = (finished.live.folder / "config.json").read_bytes()
    return msgspec.json.decode(payload, type=PipelineConfig)


def engine_answers(model: Any, config: PipelineConfig, prompts: list[list[int]]) -> list[list[int]]:
    """What an evaluation worker would answer."""
    engine = build_engine(config, device=None, greedy=True)
    engine.load_weights(
        model.state_dict(), model_config=model.config.to_json_string(), version=0, keep_kv=False
    )
    engine.add(
        SequenceStart(key=str(i), group=str(i), seed=0, prompt=tuple(prompt))
        for i, prompt in enumerate(prompts)
    )
    answers: dict[str, list[int]] = {}
    while len(answers) < len(prompts):
        answers |= {one.key: one.tokens for one in engine.step().finished}
    return [answers[str(i)] for i in range(len(prompts))]


def nearly_tied(model: Any, tokens: list[int], num_prompt_tokens: int) -> bool:
    """Whether the first two choices nearly tie at some generated position."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, num_prompt_tokens - 1 :]
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    return bool((first - second).min() < TIE)


def test_an_exported_model_gives_the_answers_of_the_engine_problem_by_problem(
    finished: FinishedRun, exported: Path, config: PipelineConfig
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert isinstance(config.task, SortDigitsConfig)
    task = build_task(
        msgspec.structs.replace(config.task, num_held_out=NUM_PROBLEMS), seed=config.seed
    )
    problems = [task.held_out(index) for index in range(NUM_PROBLEMS)]
    prompts = [tokenizer(p.prompt, add_special_tokens=False)["input_ids"] for p in problems]
    answers = engine_answers(model, config, prompts)
    differing = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            output = model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=config.rollout.sampling.max_new_tokens,
                do_sample=False,
            )
        if output[0].tolist() != [*prompt, *answer]:
            differing.append((prompt, answer))
    assert len(differing) <= 2
    assert all(nearly_tied(model, prompt + answer, len(prompt)) for prompt, answer in differing)


def test_an_exported_model_has_the_accuracy_of_the_last_evaluation(
    finished: FinishedRun, exported: Path, config: PipelineConfig
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    task = build_task(config.task, seed=config.seed)
    problems = [task.held_out(index) for index in range(task.num_held_out)]
    prompts = [tokenizer(p.prompt, add_special_tokens=False)["input_ids"] for p in problems]
    answers = engine_answers(model, config, prompts)
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    num_correct = sum(
        task.score(problem.fields, text).correct
        for problem, text in zip(problems, texts, strict=True)
    )
    assert num_correct / NUM_HELD_OUT == finished.live.tiny()["eval_after"]


def test_an_export_never_writes_over_a_folder(finished: FinishedRun, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text(json.dumps({}))
    done = run_program(
        "jigsawrl.cli.main", "export", str(finished.live.run_folder), "--to", str(tmp_path)
    )
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1
    assert (tmp_path / "precious").exists()
