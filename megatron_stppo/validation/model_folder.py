"""Check that model.path has what a command reads from it: configuration, tokenizer, chat template.

Does not import torch. Every function raises ConfigError with field, value and remedy.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.plain_text import check_continues
from megatron_stppo.sharding.hf_names import read_shape


def check_model(config: Config) -> None:
    """Check config.json of model.path and model.critic_path, and that both have the same shape."""
    for field, folder in (("model.path", config.model.path), ("model.critic_path", config.model.critic_path)):
        if folder is None:
            continue
        if not folder.is_dir():
            raise ConfigError(
                f"{field}={folder}: no such folder; give a Hugging Face checkpoint (config.json, "
                "tokenizer.json, *.safetensors)"
            )
        read_shape(folder)
    if config.model.critic_path is not None:
        _same_network(config.model.path, config.model.critic_path)


def _same_network(actor: Path, critic: Path) -> None:
    """Check that actor and critic have the same shape. The critic is built with the actor's shape, so that a
    different rotary base, for example, would be ignored without an error."""
    wanted, given = asdict(read_shape(actor)), asdict(read_shape(critic))
    for name in sorted(wanted.keys() - {"tied", "max_positions"}):
        if given[name] != wanted[name]:
            raise ConfigError(
                f"model.critic_path={critic}: its {name}={given[name]!r}, model.path's is {wanted[name]!r}; "
                "give a checkpoint of the same architecture, or leave it out"
            )


def check_tokenizer(config: Config) -> None:
    """Check that the tokenizer can be read, keeps spaces, and has ids that fit the model's vocabulary."""
    path = config.model.path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model.path={config.model.path}: holds no tokenizer.json; add the model's own")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises no narrower type
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.path={config.model.path}: tokenizer.json is not a tokenizer ({reason}); "
            "copy it again from the model's source"
        ) from None
    known = tokenizer.get_vocab(with_added_tokens=True).values()
    added = _tokenizer_settings(config.model.path).get("added_tokens_decoder") or {}
    largest = max([*known, *(int(number) for number in added if str(number).isdigit())], default=0)
    vocabulary = read_shape(config.model.path).vocab
    if largest >= vocabulary:
        raise ConfigError(
            f"model.path={config.model.path}: its tokenizer has the token id {largest}, config.json's "
            f"vocab_size={vocabulary} allows ids below it; give the tokenizer of this model"
        )
    check_continues(tokenizer, f"model.path={config.model.path}")


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, or {} if there is none. Raises ConfigError if it is not an object."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); fetch the file again") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: holds {type(settings).__name__}, not an object; fetch the file again")
    return settings


def check_chat_template(config: Config) -> None:
    """Check that the tokenizer has a chat template."""
    folder = config.model.path
    inline = "chat_template" in _tokenizer_settings(folder)
    if not inline and not (folder / "chat_template.jinja").is_file():
        raise ConfigError(f"model.path={folder}: its tokenizer has no chat_template; add chat_template.jinja")
