"""Right inputs, which the tests of wrong ones change: the shape of a model, and a row of a task file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}
ROW = {
    "data_source": "test",
    "prompt": [{"role": "user", "content": "Which city?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}},
}
Said = Callable[..., str]


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write the files of a model that are read before its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    tokenizer = Tokenizer(models.BPE({"a": 0, " ": 1}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
