"""Loads the tokenizer and the configuration of a Hugging Face folder with transformers, which runs no code of
the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from megatron_stppo.config import ConfigError
from megatron_stppo.sharding.hf_names import read_shape


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer. Raises ConfigError if transformers refuses its files, or if it has token ids for
    which the model has no embedding: transformers adds special tokens that tokenizer.json lacks."""
    with _one_line(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    text, number = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    vocabulary = read_shape(folder).vocab
    if number >= vocabulary:
        raise ConfigError(
            f"model.path={folder}: its tokenizer has the token {text!r} with id {number}, config.json's "
            f"vocab_size={vocabulary} allows ids below it; correct tokenizer_config.json"
        )
    return tokenizer


def load_config(folder: Path) -> PretrainedConfig:
    """Return the configuration. Raises ConfigError if transformers refuses config.json."""
    with _one_line(folder, "config.json"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@contextmanager
def _one_line(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # transformers and the Rust library raise errors of many types
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.path={folder}: transformers refuses its {what} ({reason}); fetch the folder again"
        ) from None
