"""Weights go from a checkpoint over megatron's shards into vLLM; the log-probs that come out are
transformers'. (Qwen3 is in test_engine.py.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ranks import run_ranks
from tests.rollout import families
from tests.rollout.tiny import build_model, reference_logprobs

CASES = {
    "llama": (1, {}, 1),
    "qwen3_moe": (2, {"expert": 2}, 2),  # experts whole on a training rank, cut on an engine rank
}


@pytest.mark.parametrize("family", CASES)
def test_engine_serves_the_checkpoint_that_the_trainer_loaded(tmp_path: Path, family: str) -> None:
    world, parallel, engine_tensor = CASES[family]
    build_model(tmp_path, family)
    seen = run_ranks(families.observe, world, tmp_path, parallel, engine_tensor)
    assert all(other == seen[0] for other in seen)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for number, prompt in enumerate(families.PROMPTS):
        ids, logprobs = seen[0][str(number)]
        expected = reference_logprobs(model, prompt + ids)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(logprobs).double(), expected, atol=2e-5, rtol=1e-5)
