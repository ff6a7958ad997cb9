"""Tokenizers: a character tokenizer for models from nothing, or the one of a checkpoint folder.

No torch here: the environment and the reward service use this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jigsawrl.config import InitModelConfig, PathModelConfig

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def build_tokenizer(alphabet: str) -> Any:
    """A `PreTrainedTokenizerFast` with one token a character: ``<pad>`` 0, ``<eos>`` 1, then the
    alphabet in sorted order. A character outside the alphabet raises ValueError in `encode`."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: i for i, token in enumerate([PAD_TOKEN, EOS_TOKEN, *sorted(set(alphabet))])
    }
    inner = Tokenizer(WordLevel(vocabulary))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(config: InitModelConfig | PathModelConfig, alphabet: str) -> Any:
    """The pipeline's tokenizer. Raises ValueError, in one line, where there is none to use."""
    if isinstance(config, InitModelConfig):
        return build_tokenizer(alphabet)
    from transformers import AutoTokenizer

    # Without this check transformers makes an empty tokenizer from the model's type alone.
    if not any((Path(config.path) / name).exists() for name in TOKENIZER_FILES):
        raise ValueError(
            f"model.path: no tokenizer in {config.path} (none of {', '.join(TOKENIZER_FILES)});"
            " save one beside the weights"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"model.path: the tokenizer in {config.path} can't be read: {str(error).splitlines()[0]}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model.path: the tokenizer in {config.path} has no end-of-sequence token")
    check_vocabulary(tokenizer, Path(config.path))
    return tokenizer


def check_vocabulary(tokenizer: Any, folder: Path) -> None:
    """Raise ValueError where the tokenizer has ids that the model's embedding has not."""
    from transformers import AutoConfig

    try:
        vocab_size = int(AutoConfig.from_pretrained(folder, local_files_only=True).vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"model.path: {folder}/config.json can't be read: {error}") from error
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise ValueError(
            f"model.path: the tokenizer in {folder} has token ids up to {largest}, the model only"
            f" {vocab_size} embeddings; use the tokenizer that the model was trained with"
        )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, no special tokens added; raises ValueError for what has no token."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the tokenizers library raises bare Exception, nothing narrower
        raise ValueError(f"no tokens for {text!r}: {error}") from error
    return ids


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of token ids, special tokens left out."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text
