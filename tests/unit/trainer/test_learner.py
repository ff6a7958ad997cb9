"""The learner: restores bit by bit, keeps its reference, exports what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from jigsawrl.config import (
    CheckpointConfig,
    OptimizerConfig,
    PathModelConfig,
    PipelineConfig,
    TrainerConfig,
)
from jigsawrl.config_algorithm import GRPOConfig, KLConfig, PPOClipConfig
from jigsawrl.contract.message import Ledger
from jigsawrl.models.loading import export_checkpoint, model_from_config
from jigsawrl.models.weights import unpack
from services.trainer import checkpoint
from services.trainer.batch import Sample
from services.trainer.export import export
from services.trainer.learner import Learner
from services.trainer.parallel import full_state, leave_gang
from services.trainer.spans import Spans


@contextmanager
def started(
    config: PipelineConfig, run: Path, gang_epoch: int = 1, spans: Spans | None = None
) -> Iterator[Learner]:
    learner = Learner(
        config,
        run_folder=run,
        gang_epoch=gang_epoch,
        device=torch.device("cpu"),
        spans=spans or Spans(),
        progress=lambda *_: None,
        check_stop=lambda: None,
    )
    try:
        learner.start()
        yield learner
    finally:
        leave_gang()


def weights(learner: Learner) -> dict[str, Tensor]:
    manifest, payload = learner.pack_weights(pipeline="p", incarnation=1)
    return unpack(manifest, bytearray(payload))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def with_kl(config: PipelineConfig) -> PipelineConfig:
    return msgspec.structs.replace(
        config, algorithm=GRPOConfig(kl=KLConfig(coefficient=0.1), loss=PPOClipConfig(clip_low=0.1))
    )


def test_the_step_after_a_restore_is_equal_bit_by_bit(
    with_kl: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    with started(with_kl, tmp_path) as learner:
        assert learner.version == 0
        start = weights(learner)
        first = learner.train(samples, version=0, ledger=Ledger(cursor=5))
        assert first["kl"] == pytest.approx(0.0, abs=1e-7)  # the reference is version 0
        learner.commit_checkpoint()
        expected_metrics = learner.train(samples, version=1, ledger=Ledger(cursor=10))
        expected = weights(learner)
    with started(with_kl, tmp_path, gang_epoch=2) as learner:
        assert (learner.version, learner.ledger.cursor) == (1, 5)
        assert learner.train(samples, version=1, ledger=Ledger(cursor=10)) == expected_metrics
        assert expected_metrics["kl"] > 0
        assert_equal(weights(learner), expected)
    assert any(not torch.equal(start[name], expected[name]) for name in start)


def test_learning_rate_zero_changes_nothing(
    config: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    still = TrainerConfig(num_steps=4, optimizer=OptimizerConfig(learning_rate=0.0))
    with started(msgspec.structs.replace(config, trainer=still), tmp_path) as learner:
        before = weights(learner)
        learner.train(samples, version=0, ledger=Ledger(cursor=0))
        assert_equal(weights(learner), before)


def test_each_phase_leaves_a_span(
    with_kl: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    spans = Spans()
    trainer = TrainerConfig(num_steps=4, num_minibatches=2)
    config = msgspec.structs.replace(with_kl, trainer=trainer)
    with started(config, tmp_path, spans=spans) as learner:
        learner.train(samples, version=0, ledger=Ledger(cursor=0))
        learner.commit_checkpoint()
    kinds = [span.kind for span in spans.drain()]
    assert set(kinds) == {
        "proximal_logprobs",
        "reference_logprobs",
        "forward_backward",
        "optimizer",
        "checkpoint",
    }
    assert kinds.count("optimizer") == 2


def test_checkpoints_are_due_at_the_start_every_so_often_and_at_the_end(
    config: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    trainer = TrainerConfig(num_steps=3, checkpoint=CheckpointConfig(every=2))
    due = []
    with started(msgspec.structs.replace(config, trainer=trainer), tmp_path) as learner:
        due.append(learner.checkpoint_is_due())
        for version in range(3):
            learner.train(samples, version=version, ledger=Ledger(cursor=0))
            due.append(learner.checkpoint_is_due())
    assert due == [True, False, True, True]


def test_a_replaced_gang_commits_nothing_more(
    config: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    with started(config, tmp_path) as learner:
        learner.commit_checkpoint()
        learner.train(samples, version=0, ledger=Ledger())
        checkpoint.path_of(tmp_path, version=0, gang_epoch=2).mkdir()  # its successor begins
        learner.commit_checkpoint()
        learner.commit_at_stop()
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert names == ["v0-e1", "v0-e2"]


def test_a_gang_that_was_replaced_before_it_began_says_so(
    config: PipelineConfig, tmp_path: Path
) -> None:
    checkpoint.path_of(tmp_path, version=3, gang_epoch=2).mkdir(parents=True)
    reason = r"of a later gang than 1: .* move that folder away"
    with pytest.raises(ValueError, match=reason), started(config, tmp_path):
        pass


def test_bfloat16_publishes_bfloat16_and_keeps_float32(
    config: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    half = TrainerConfig(num_steps=4, dtype="bfloat16")
    with started(msgspec.structs.replace(config, trainer=half), tmp_path) as learner:
        metrics = learner.train(samples, version=0, ledger=Ledger(cursor=0))
        assert metrics["grad_norm"] > 0
        assert {tensor.dtype for tensor in weights(learner).values()} == {torch.bfloat16}
        saved = checkpoint.read(learner.commit_checkpoint())
    assert {tensor.dtype for tensor in saved.tensors["model"].values()} == {torch.float32}


def test_an_export_holds_the_published_weights(
    config: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    with started(config, tmp_path) as learner:
        learner.commit_checkpoint()
        learner.train(samples, version=0, ledger=Ledger(cursor=0))
        learner.commit_checkpoint()
        expected = weights(learner)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert export(tmp_path, to=tmp_path / "out", version=None) == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_equal(full_state(model), expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1=") == [3, 12]
    assert export(tmp_path, to=tmp_path / "first", version=0) == 0
    with pytest.raises(ValueError, match="exists"):
        export(tmp_path, to=tmp_path / "out", version=None)
    with pytest.raises(ValueError, match="no committed checkpoint of version 7"):
        export(tmp_path, to=tmp_path / "other", version=7)


def test_a_local_checkpoint_with_tied_embeddings_is_trained_and_exported(
    config: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    from jigsawrl.models.tokenizer import build_tokenizer

    tied = tied_model()
    export_checkpoint(tmp_path / "base", tied, build_tokenizer("0123456789="))
    path = PathModelConfig(path=str(tmp_path / "base"))
    with started(msgspec.structs.replace(config, model=path), tmp_path / "run") as learner:
        assert_equal(weights(learner), full_state(tied))
        learner.train(samples, version=0, ledger=Ledger(cursor=0))
        learner.commit_checkpoint()
        expected = weights(learner)
    assert "lm_head.weight" not in expected
    with started(
        msgspec.structs.replace(config, model=path), tmp_path / "run", gang_epoch=2
    ) as learner:
        assert_equal(weights(learner), expected)
    export(tmp_path / "run", to=tmp_path / "out", version=None)


def tied_model() -> Any:
    from transformers import Qwen3Config

    shape = Qwen3Config(
        vocab_size=13,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    return model_from_config(shape.to_json_string(use_diff=False), dtype=torch.float32)


def test_a_run_with_only_corrupt_checkpoints_is_not_started_over(
    config: PipelineConfig, tmp_path: Path
) -> None:
    with started(config, tmp_path) as learner:
        path = learner.commit_checkpoint()
    (path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="corrupt"), started(config, tmp_path):
        pass
