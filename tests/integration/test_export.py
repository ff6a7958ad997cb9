"""The exported model is the one that was evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from jigsawrl.config import PipelineConfig
from jigsawrl.tasks import build_task
from tests.integration.conftest import FinishedRun
from tests.integration.live_run import NUM_HELD_OUT, run_program

pytestmark = pytest.mark.slow


def test_an_exported_model_gives_the_accuracy_of_the_last_evaluation(
    finished: FinishedRun, tmp_path: Path
) -> None:
    target = tmp_path / "export"
    run_folder = finished.live.run_folder
    done = run_program("jigsawrl.cli.main", "export", str(run_folder), "--to", str(target))
    assert done.returncode == 0, done.stderr

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    config = msgspec.json.decode((run_folder / "config.json").read_bytes(), type=PipelineConfig)
    task = build_task(config.task, seed=config.seed)
    num_correct = 0
    for index in range(task.num_held_out):
        problem = task.held_out(index)
        inputs = tokenizer(problem.prompt, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=config.rollout.sampling.max_new_tokens,
                do_sample=False,
            )
        generated = output[0, inputs["input_ids"].shape[1] :]
        response = tokenizer.decode(generated, skip_special_tokens=True)
        num_correct += task.score(problem.fields, response).correct
    # One problem may tip over where the top two logits nearly tie.
    assert abs(num_correct - finished.live.tiny()["eval_after"] * NUM_HELD_OUT) <= 1.001


def test_an_export_never_writes_over_a_folder(finished: FinishedRun, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text(json.dumps({}))
    done = run_program(
        "jigsawrl.cli.main", "export", str(finished.live.run_folder), "--to", str(tmp_path)
    )
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1
    assert (tmp_path / "precious").exists()
