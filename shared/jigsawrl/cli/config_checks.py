"""What a valid pipeline file can still get wrong: keys that cancel each other, files on disk.

Called by `config_file`. Knows checkpoint folders by their files only: no torch, no transformers.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jigsawrl.cli.errors import ConfigError
from jigsawrl.config import (
    ARCHITECTURES,
    AsyncConfig,
    InitModelConfig,
    PathModelConfig,
    PipelineConfig,
    ReasoningGymConfig,
    SortDigitsConfig,
)
from jigsawrl.config_algorithm import PPOConfig
from jigsawrl.config_tracking import PACKAGES

if TYPE_CHECKING:
    from jigsawrl.tasks import Task

NUM_CHECKED_PROBLEMS = 200
"""Of the training stream and of the held-out set: a moment's work for every task."""


def inert_keys(config: PipelineConfig) -> dict[str, str]:
    """Keys that change nothing in this config, by path, each with the reason as ``with ...``.

    A file that writes one is refused: its author expects something that won't happen."""
    inert: dict[str, str] = {}
    if not config.evaluation.enabled:
        why = "with evaluation.enabled = false; remove it or enable evaluation"
        inert["evaluation.every"] = inert["evaluation.max_running"] = why
        inert["scheduling.memory.evaluation_bytes"] = why
    if isinstance(config.mode, AsyncConfig) and config.mode.max_staleness == 0:
        inert["mode.keep_kv"] = (
            "with mode.max_staleness = 0: weights never land in mid-sequence; remove it"
        )
    if isinstance(config.task, SortDigitsConfig) and config.task.num_turns == 1:
        inert["task.turn_delay_s"] = (
            "with task.num_turns = 1: the environment says nothing; remove it or raise num_turns"
        )
    algorithm = config.algorithm
    if config.trainer.num_minibatches > 1:
        return inert
    if algorithm.proximal == "recompute":
        inert["algorithm.loss"] = (
            'with trainer.num_minibatches = 1 and algorithm.proximal = "recompute": a batch is'
            " trained once, from the policy that the ratio is taken against, so it is always 1;"
            " remove it or raise num_minibatches"
        )
    if isinstance(algorithm, PPOConfig):
        inert["algorithm.critic.value_clip"] = (
            "with trainer.num_minibatches = 1: a batch is trained once, from the values that the"
            " clip is around; remove it or raise num_minibatches"
        )
    return inert


def check_files(config: PipelineConfig) -> None:
    """Raise `ConfigError` where a checkpoint folder, a tracker or a task can't be used."""
    if isinstance(config.model, PathModelConfig):
        num_positions = check_checkpoint(Path(config.model.path))
        key = "model.path"
    else:
        assert isinstance(config.model, InitModelConfig)
        num_positions, key = config.model.max_position_embeddings, "model.max_position_embeddings"
    _check_trackers(config)
    max_new_tokens = config.rollout.sampling.max_new_tokens
    if num_positions is not None and max_new_tokens >= num_positions:
        raise ConfigError(
            f"rollout.sampling.max_new_tokens: {max_new_tokens} leaves no room for a prompt:"
            f" {key} allows {num_positions} positions"
        )
    task = _task(config)
    if num_positions is not None:
        _check_prompts(config, task, num_positions=num_positions, key=key)


def _check_trackers(config: PipelineConfig) -> None:
    """Raise `ConfigError` for one whose package is not installed."""
    for tracker in config.tracking.chosen() if config.tracking is not None else ():
        if importlib.util.find_spec(PACKAGES[tracker]) is None:
            raise ConfigError(
                f"tracking.{tracker}: {PACKAGES[tracker]} is missing: pip install"
                " 'jigsawrl[tracking]'"
            )


def _check_prompts(config: PipelineConfig, task: Task, *, num_positions: int, key: str) -> None:
    """Raise `ConfigError` for a problem whose prompt has no tokens, or no room in the model. Looks at
    the first problems only: a task may have any number."""
    count = _counter(config)
    num_turns = config.turns().num_turns
    # What a prompt must leave room for: a token of the only turn, which just ends earlier then; or all
    # that several turns may need, since a turn that finds no room fails its sequence.
    num_others = 1 if num_turns == 1 else config.max_tokens_behind_prompt()
    problems = [("training", i, task.train(i)) for i in range(NUM_CHECKED_PROBLEMS)]
    num_held_out = min(task.num_held_out, NUM_CHECKED_PROBLEMS)
    problems += [("held-out", i, task.held_out(i)) for i in range(num_held_out)]
    for kind, index, problem in problems:
        num_tokens = count(f"task: the prompt of {kind} problem {index}", problem.prompt)
        if num_tokens + num_others > num_positions:
            room = "an answer"
            if num_turns > 1:
                room = f"the {num_others} tokens of {num_turns} turns"
            raise ConfigError(
                f"task: the prompt of {kind} problem {index} has {num_tokens} tokens, which leaves no"
                f" room for {room}: {key} allows {num_positions} positions"
            )


def _counter(config: PipelineConfig) -> Callable[[str, str], int]:
    """Tokens of a text, without transformers: a model from nothing has one a character."""
    if isinstance(config.model, InitModelConfig):
        return lambda where, text: len(text)
    from tokenizers import Tokenizer

    folder = Path(config.model.path)
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception, nothing narrower
        raise ConfigError(f"model.path: {folder / 'tokenizer.json'} is corrupt: {error}") from None

    def count(where: str, text: str) -> int:
        try:
            return len(tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library raises bare Exception, nothing narrower
            raise ConfigError(
                f"{where} has no tokens in the tokenizer of {folder} ({error}): {text!r}; use a"
                " model whose tokenizer knows these characters"
            ) from None

    return count


def _task(config: PipelineConfig) -> Task:
    from jigsawrl.tasks import build_task

    try:
        return build_task(config.task, seed=config.seed)
    except ValueError as error:
        raise ConfigError(f"task: {error}") from None
    except ImportError as error:
        if not isinstance(config.task, ReasoningGymConfig):
            raise
        raise ConfigError(f"task: {error.name} is missing: pip install 'jigsawrl[tasks]'") from None


def check_checkpoint(folder: Path) -> int | None:
    """Raise `ConfigError` unless the folder holds config, tokenizer and weights that fit together.

    Returns the number of positions the model was made for, None where its config does not say."""
    if not folder.is_dir():
        raise ConfigError(f"model.path: {folder} is no folder; give a Hugging Face checkpoint")
    config = _read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"model.path: {folder / 'config.json'}: model_type {kind!r} is not supported;"
            f" one of {', '.join(ARCHITECTURES)}"
        )
    _check_tokenizer(folder / "tokenizer.json", config.get("vocab_size"))
    for shard in _weight_files(folder):
        _check_safetensors(shard)
    positions = config.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"model.path: {path} is missing; save model and tokenizer with save_pretrained"
        ) from None
    except OSError as error:
        raise ConfigError(f"model.path: {path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"model.path: {path} is corrupt: {error}; copy it again") from None
    if not isinstance(data, dict):
        raise ConfigError(f"model.path: {path} is corrupt: no JSON object; copy it again")
    return data


def _check_tokenizer(path: Path, vocab_size: object) -> None:
    data = _read_json(path)
    model = data.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        ids = [number for number in vocabulary.values() if isinstance(number, int)]
    else:  # a Unigram model lists its pieces by id
        ids = list(range(len(vocabulary))) if isinstance(vocabulary, list) else []
    added = data.get("added_tokens") or []
    ids += [token["id"] for token in added if isinstance(token, dict) and "id" in token]
    if not ids:
        raise ConfigError(f"model.path: {path} is corrupt: no vocabulary; copy it again")
    if isinstance(vocab_size, int) and max(ids) >= vocab_size:
        raise ConfigError(
            f"model.path: the tokenizer does not match the model: token id {max(ids)} in {path},"
            f" but vocab_size {vocab_size} in config.json; use the tokenizer of this checkpoint"
        )


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ConfigError(
            f"model.path: {folder} holds no model.safetensors; convert the weights to safetensors"
        )
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"model.path: {index} is corrupt: no weight_map; copy it again")
    return [folder / name for name in sorted(set(names.values()))]


def _check_safetensors(path: Path) -> None:
    """Header and size, as the format has them: 8 bytes of header length, JSON header, data."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > num_bytes - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected = 8 + header_bytes + max(ends, default=0)
        if num_bytes != expected:
            raise ValueError(f"{num_bytes} bytes instead of {expected}")
    except OSError as error:
        raise ConfigError(f"model.path: {path}: {error.strerror}; copy it again") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"model.path: {path} is corrupt: {error}; copy it again") from None
