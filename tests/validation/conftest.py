"""A configuration whose files exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 1024,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A configuration whose files exist: 2-way tensor parallel, 64 tasks, 4 minibatches."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    tokenizer = Tokenizer(models.BPE({"a": 0, " ": 1}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("train", "evaluate", "demonstrations"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "run.yaml").write_text(
        f"run: {{root: {tmp_path}/runs, name: r}}\n"
        f"model: {{path: {tmp_path}/model}}\n"
        f"data: {{train: {tmp_path}/train.jsonl, evaluate: {tmp_path}/evaluate.jsonl, "
        f"demonstrations: {tmp_path}/demonstrations.jsonl}}\n"
        f"cold_start: {{output: {tmp_path}/out}}\n"
        "parallel: {tensor: 2}\nrollout: {tasks_per_iteration: 64}\nupdate: {minibatches: 4}\n"
    )
    return tmp_path / "run.yaml"
