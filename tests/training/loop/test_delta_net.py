"""Runs of mixtures, with gated delta nets or with sinks and windows: the engine's experts replayed, killed,
resumed, converted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rollout.vllm.tiny import build_model
from tests.training.loop import small_run

SETTINGS = (
    "parallel.sequence=true",
    "algorithm.routing_replay=rollout",
    "model.recompute=selective",
    "run.iterations=4",
    "run.checkpoint_every=2",
    "run.evaluate_every=2",
)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_a_run_is_resumed_with_the_same_bits_and_converted(tmp_path: Path, family: str) -> None:
    config, folder = small_run.write(tmp_path), tmp_path / "own"
    build_model(folder, family)
    given = (*SETTINGS, f"model.path={folder}")
    runs = [tmp_path / "runs" / name for name in ("whole", "cut")]
    commands = [(*given, "run.name=whole"), (*given, "run.name=cut", "--resume")]
    small_run.train_until(runs[1] / "checkpoints" / "LATEST", config, *given, "run.name=cut")
    for command in commands:
        done = small_run.run("train", config, *command, python=sys.executable).succeeded()
    assert "resumed from step_2 of 4" in done.stderr
    whole, cut = (small_run.tensors(run, 4) for run in runs)
    assert cut == whole
    rows = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "mismatch/mean_abs" in row]  # another row has an evaluation only
    assert len(trained) == 4
    assert all(row["mismatch/mean_abs"] < 1e-5 and row["actor/first_kl_to_old"] == 0 for row in trained)
    output = tmp_path / "out"
    words = ("convert", "to-hf", str(config), "latest", str(output), *given, "run.name=whole")
    small_run.run_command(words, python=sys.executable).succeeded()
    before: Any = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after: Any = AutoModelForCausalLM.from_pretrained(output).state_dict()
    assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in before.items()}
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert not still, "every weight is trained"
