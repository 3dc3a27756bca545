"""Start of an asynchronous run's trainer, before the models are built."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.serving.start import start_first
from tests.ranks import run_ranks
from tests.rollout.tiny import build_model


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
        start_first(config, torch.float32, None)
    except ConfigError as error:
        return dist.get_rank(), str(error)
    raise AssertionError("no error")


def test_an_error_of_the_first_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    build_model(tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text(
        '{"data_source": "test", "prompt": [{"role": "user", "content": "Which city?"}], '
        '"reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}}}\n'
    )
    found = run_ranks(refused, 2, tmp_path)
    assert [rank for rank, _ in found] == [0, 1]
    assert {said.partition(" on ")[0] for _, said in found} == {"serving.address=192.0.2.1: cannot listen"}
