"""Start of an asynchronous run's trainer, before the models are built."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_stppo.commands.serve import _open
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.replicas.trainer.start import start_hub
from megatron_stppo.replicas.wire.messages import Trained
from tests.ranks import run_ranks
from tests.replicas.light import write_project

TRAINED = Trained(Layout(), "local")


def refused(folder: Path) -> tuple[int, str]:
    config = Config.model_validate(
        {
            "model": {"path": folder / "model"},
            "run": {"root": folder, "name": "run"},
            "data": {"train": folder / "tasks.jsonl"},
            "serving": {"replicas": 1, "address": "192.0.2.1", "start": False},  # reserved for documents
        }
    )
    try:
        start_hub(config, torch.float32, TRAINED)
    except ConfigError as error:
        return dist.get_rank(), str(error)
    raise AssertionError("no error")


def opened_elsewhere(folder: Path) -> Config:
    """Start a trainer in `folder`, and open its configuration as a replica does that starts in /."""
    os.chdir(folder)
    given = {
        "model": {"path": "model"},
        "data": {"train": "tasks.jsonl"},
        "environment": {"kind": "own_beside", "max_observation_tokens": 8},
        "rollout": {"max_prompt_tokens": 60, "max_turn_tokens": 8},
        "serving": {"replicas": 1, "start": False},
    }
    start_hub(Config.model_validate(given).beside(Path("project")), torch.float32, TRAINED)
    os.chdir("/")
    return _open(folder / "runs" / "run", [])


def test_a_replica_that_starts_in_another_folder_finds_the_model_and_the_environment(tmp_path: Path) -> None:
    write_project(tmp_path, 512)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "own_beside.py").touch()
    (found,) = run_ranks(opened_elsewhere, 1, tmp_path)
    assert found.model.path == tmp_path / "model"
    assert found.environment.modules == tmp_path / "project"


def test_an_error_of_the_first_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    write_project(tmp_path, 512)
    found = run_ranks(refused, 2, tmp_path)
    assert [rank for rank, _ in found] == [0, 1]
    assert {said.partition(" on ")[0] for _, said in found} == {"serving.address=192.0.2.1: cannot listen"}
