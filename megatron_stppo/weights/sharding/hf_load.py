"""Loads tokenizer and configurations of a Hugging Face folder with transformers, which runs no code of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig

from megatron_stppo.config import ConfigError
from megatron_stppo.data.text.plain_text import check_continues
from megatron_stppo.weights.sharding.hf_names import read_shape


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer. Raises ConfigError if it cannot be used.

    tokenizer.json alone does not show this: transformers adds special tokens that it lacks, and builds the
    tokenizers of some classes anew, with another treatment of spaces.
    """
    with _one_line(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer(["a"])  # reads model_max_length
    text, number = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    vocabulary = read_shape(folder).vocab
    if number >= vocabulary:
        raise ConfigError(
            f"model.path={folder}: its tokenizer has the token {text!r} with id {number}, config.json's "
            f"vocab_size={vocabulary} allows ids below it; correct tokenizer_config.json"
        )
    check_continues(tokenizer.backend_tokenizer, f"model.path={folder}")
    return tokenizer


def load_config(folder: Path) -> PretrainedConfig:
    """Return the configuration. Raises ConfigError if transformers refuses config.json."""
    with _one_line(folder, "config.json"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def load_generation(folder: Path) -> GenerationConfig | None:
    """Return the configuration of generation, if any. Raises ConfigError if transformers refuses it."""
    if not (folder / "generation_config.json").exists():
        return None
    with _one_line(folder, "generation_config.json"):
        return GenerationConfig.from_pretrained(folder)


@contextmanager
def _one_line(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # transformers and the Rust library raise errors of many types
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.path={folder}: transformers refuses its {what} ({reason}); fetch the folder again"
        ) from None
