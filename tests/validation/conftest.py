"""A configuration whose files exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broken_inputs import inputs
from tests.broken_inputs.inputs import write_model

SHAPE = inputs.SHAPE | {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384}
del SHAPE["max_position_embeddings"]  # it is then 32,768


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A configuration whose files exist: 2-way tensor parallel, 64 tasks, 4 minibatches."""
    write_model(tmp_path / "model", SHAPE)
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
