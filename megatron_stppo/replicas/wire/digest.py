"""The digest of a model's folder, which is equal for the trainer and its replicas."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_names import read_shape

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ENDS = ("config.json", "generation_config.json")  # files with the ids that end a text


def model_digest(path: Path) -> str:
    """Return 64 hexadecimal digits: a hash of the model's shape, its tokenizer and its end-of-text ids.

    The weights do not count: replicas get them from the trainer. Raises ConfigError if a file cannot be read.
    """
    shape = json.dumps(asdict(read_shape(path)), sort_keys=True)
    parts = [shape.encode(), *(_content(path / name) for name in TOKENIZER)]
    for template in sorted((path / "additional_chat_templates").glob("*.jinja")):
        parts += [template.name.encode(), _content(template)]
    parts += [json.dumps(_end_ids(path / name)).encode() for name in ENDS]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    """Return the file's bytes; none if there is no such file."""
    try:
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); fetch the file again") from None


def _end_ids(path: Path) -> Any:
    text = _content(path)
    try:
        settings = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}); fetch the file again") from None
    return settings.get("eos_token_id") if isinstance(settings, dict) else None
