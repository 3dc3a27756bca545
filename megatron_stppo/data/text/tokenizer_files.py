"""Reads the files of a model's folder that decide how a chat becomes token ids, and computes their digests.

Weights belong to the ids that they were trained on: with other files the same text has other ids.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_stppo.config import ConfigError

SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template"
ENDS = ("config.json", "generation_config.json")  # files with the ids that end a text
# Settings that have no part in the ids. transformers writes the last three anew when it saves a tokenizer.
OTHERS = (TEMPLATE, "model_max_length", "name_or_path", "is_local", "local_files_only")


def digests(folder: Path) -> dict[str, str]:
    """Return {what: 64 hexadecimal digits} of the tokenizer, chat template and end-of-text ids of a folder.

    A chat template has the same digest in tokenizer_config.json as in its own file. Raises ConfigError if a
    file cannot be read.
    """
    tokenizer = folder / "tokenizer.json"
    settings = {name: value for name, value in json_object(folder / SETTINGS).items() if name not in OTHERS}
    ends = [json_object(folder / name).get("eos_token_id") for name in ENDS]
    parts = {
        "tokenizer": [text(tokenizer) if tokenizer.exists() else "", settings],
        "chat template": chat_templates(folder),
        "end-of-text ids": ends,
    }
    return {
        what: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()
        for what, part in parts.items()
    }


def different(recorded: Mapping[str, str], folder: Path) -> str:
    """Return what of a folder has other digests than those that were recorded, or "". What was not recorded
    counts as equal. Example: "tokenizer and chat template"."""
    here = digests(folder)
    return " and ".join(what for what, digest in here.items() if recorded.get(what, digest) != digest)


def json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file, or {} if there is no file. Raises ConfigError for anything else."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); fetch the file again") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: holds {type(settings).__name__}, not an object; fetch the file again")
    return settings


def chat_templates(folder: Path) -> dict[str, Any]:
    """Return the chat templates by name, from the files that transformers reads."""
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        paths["default"] = folder / "chat_template.jinja"
    if paths:
        return {name: text(path) for name, path in paths.items()}
    inline = json_object(folder / SETTINGS).get(TEMPLATE)
    if isinstance(inline, list):
        named = [item for item in inline if isinstance(item, dict)]
        return {str(item.get("name")): item.get("template") for item in named}
    return inline if isinstance(inline, dict) else {} if inline is None else {"default": inline}


def text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); fetch the file again") from None
