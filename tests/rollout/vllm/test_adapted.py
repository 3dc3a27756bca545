"""Adapters go from megatron's shards into vLLM, which applies them itself. Its log-probs agree with those of
transformers with merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stppo.cluster.launch.vllm_environment import LORA_RANKS
from megatron_stppo.config import LoraConfig
from tests.ranks import run_ranks
from tests.rollout.vllm import adapted, families
from tests.rollout.vllm.test_families import SIZES
from tests.rollout.vllm.tiny import build_tokenizer, reference_logprobs
from tests.training.update.layouts import write_model

# {family: (ranks, layout of the trainer, tensor-parallel size of the engine, model.lora)}
CASES = {"qwen3": (2, {"pipeline": 2}, 2, {"rank": 4, "alpha": 6})}
MORE = {
    "llama": (2, {"tensor": 2}, 2, {"rank": 9}),  # one head of keys, which both ranks hold
    "qwen2": (2, {"tensor": 2}, 1, {"rank": 8, "targets": ["q_proj", "v_proj", "up_proj"]}),
}


@pytest.mark.parametrize("family", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_engine_applies_the_adapters_of_the_trainer(tmp_path: Path, family: str) -> None:
    world, parallel, engine_tensor, given = (CASES | MORE)[family]
    write_model(tmp_path, family, **SIZES)
    build_tokenizer().save_pretrained(tmp_path)
    lora = {"sync": "adapter"} | given
    ranks = run_ranks(adapted.observe, world, tmp_path, parallel, engine_tensor, lora)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    values, scale = adapted.values(tmp_path, lora), LoraConfig.model_validate(lora).scale
    for turn in range(4):
        for number, prompt in enumerate(families.PROMPTS):
            ids, logprobs = ranks[0][f"{turn} {number}"]
            assert all(other[f"{turn} {number}"] == (ids, logprobs) for other in ranks)
            expected = reference_logprobs(model, prompt + ids)[len(prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(logprobs).double(), expected, atol=2e-5, rtol=1e-5)
        if turn == 0:
            merge(model, values, scale)
    for number in range(len(families.PROMPTS)):
        assert ranks[0][f"3 {number}"] == ranks[0][f"2 {number}"], "before and after the engine's sleep"
    assert ranks[0]["slots"] == [0] * len(families.PROMPTS[0])
    assert all(rank["old model is freed"] for rank in ranks), "before the new engine is built"
    assert ranks[0]["vLLM's ranks"] == LORA_RANKS
    engine_timeout, run_timeout = ranks[0]["timeouts"]
    assert engine_timeout == run_timeout, "build_engine passes the timeout of the configuration"
    assert ranks[0]["no LoRA"] == (
        "model.lora.sync=adapter: vLLM has no LoRA on UnspecifiedPlatform; set model.lora.sync=merged"
    )


@torch.no_grad()
def merge(model: Any, values: dict[str, torch.Tensor], scale: float) -> None:
    weights = dict(model.named_parameters())
    for key, a in values.items():
        if ".lora_A." in key:
            weights[key.replace(".lora_A", "")] += scale * values[key.replace("lora_A", "lora_B")] @ a
