"""Loads tokenizer and configurations of a Hugging Face folder with transformers, which runs no code of it."""

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig

from megatron_stppo.config import ConfigError
from megatron_stppo.data.text.plain_text import check_continues
from megatron_stppo.weights.sharding.hf_names import read_shape

# Names in a chat template that are no setting: variables that each chat determines, and constants.
NO_ARGUMENTS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"} | {
    "true",
    "false",
    "none",
}


def load_tokenizer(folder: Path, arguments: Mapping[str, bool | int | float | str] | None = None) -> Any:
    """Return the tokenizer. Raises ConfigError if it cannot be used.

    tokenizer.json alone does not show this: transformers adds special tokens that it lacks, and builds the
    tokenizers of some classes anew, with another treatment of spaces.

    arguments: variables of the chat template (model.template_arguments).
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
    if arguments:
        tokenizer.chat_template = _with_arguments(tokenizer.chat_template, arguments)
    return tokenizer


def _with_arguments(template: Any, arguments: Mapping[str, bool | int | float | str]) -> Any:
    """Return a chat template that begins by setting the variables, so that every use of it has them.

    Raises ConfigError for a name that the template does not have.
    Example: "{%- set enable_thinking = False %}{{ messages }}" of "{{ messages }}".
    """
    if isinstance(template, dict):
        return {name: _with_arguments(text, arguments) for name, text in template.items()}
    for name in arguments:
        words = set(re.findall(r"[A-Za-z_]\w*", template or ""))
        if name in NO_ARGUMENTS or name not in words:
            near = difflib.get_close_matches(name, words, 1)
            hint = f"; did you mean {near[0]}?" if near and near[0] not in NO_ARGUMENTS else ""
            raise ConfigError(
                f"model.template_arguments.{name}: the chat template has no such variable{hint}"
            )
    # !a writes what jinja reads: True, 3, 0.5 or a quoted text
    settings = "".join(f"{{%- set {name} = {value!a} %}}" for name, value in arguments.items())
    return settings + template


def load_config(folder: Path) -> PretrainedConfig:
    """Return the configuration; that of the text model, if the model has images too.

    Raises ConfigError if transformers refuses config.json."""
    with _one_line(folder, "config.json"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()


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
