"""A folder with right inputs, and the line that a command prints for a wrong one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_stppo import __main__ as command_line
from megatron_stppo.environments.retrieval import BM25Retriever
from tests.broken_inputs.inputs import ROW, SHAPE, Said, write_model


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", SHAPE)
    (tmp_path / "tasks.jsonl").write_text((json.dumps(ROW) + "\n") * 4)
    BM25Retriever.build([{"id": "1", "contents": "Paris is a city."}], tmp_path / "index")
    config = {
        "run": {"name": "r", "root": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "tasks.jsonl"), "evaluate": str(tmp_path / "tasks.jsonl")},
        "environment": {
            "max_turns": 1,
            "max_observation_tokens": 24,
            "retrieval": {"index": str(tmp_path / "index")},
        },
        "rollout": {"max_turn_tokens": 8, "max_prompt_tokens": 64, "tasks_per_iteration": 4},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Return a function that runs a command, asserts exit code 2 and returns the one line printed."""

    def run(*arguments: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["megatron-stppo", *map(str, arguments)])
        for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)
        code, message = command_line.run(), capsys.readouterr().err
        assert code == 2, message
        assert len(message.splitlines()) == 1 and message.startswith("megatron-stppo: "), message
        return message.removeprefix("megatron-stppo: ").rstrip("\n")

    return run
