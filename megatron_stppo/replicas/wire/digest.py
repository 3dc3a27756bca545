"""The digest of a model's folder, which is equal for the trainer and its replicas."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from megatron_stppo.data.text.tokenizer_files import digests
from megatron_stppo.weights.sharding.hf_names import read_shape


def model_digest(path: Path) -> str:
    """Return 64 hexadecimal digits: a hash of the model's shape, its tokenizer and its end-of-text ids.

    The weights do not count: replicas get them from the trainer. Raises ConfigError if a file cannot be read.
    """
    parts = [asdict(read_shape(path)), digests(path)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
