"""Weights from a checkpoint go through megatron's shards into vLLM, whose log-probs agree with those of
transformers. (Qwen3 is in test_engine.py.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_stppo.families.qwen3_next import KINDS
from tests.ranks import run_ranks
from tests.rollout.vllm import families
from tests.rollout.vllm.tiny import CONTEXT, VOCABULARY, build_tokenizer, reference_logprobs
from tests.training.update.layouts import write_model

CASES = {
    "llama": (1, {}, 1),
    "qwen3_moe": (2, {"expert": 2}, 2),  # experts whole on a training rank, cut on an engine rank
    "qwen3_5": (1, {}, 1),
}
MORE = {
    "qwen2": (2, {"pipeline": 2}, 2),
    "mixtral": (1, {}, 1),
    "qwen3_5_moe": (2, {"expert": 2}, 2),
    "qwen3_next": (2, {"pipeline": 2}, 2),
    "gpt_oss": (2, {"expert": 2}, 2),
}
# what an engine on a CPU can serve
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
}


@pytest.mark.parametrize("family", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_engine_serves_the_checkpoint_that_the_trainer_loaded(tmp_path: Path, family: str) -> None:
    world, parallel, engine_tensor = (CASES | MORE)[family]
    hybrid = family in ("qwen3_5", "qwen3_5_moe", "qwen3_next")
    changes = {"layer_types": [*KINDS[::-1]]} if hybrid else {}
    changes |= {"intermediate_size": 128} if family == "gpt_oss" else {}
    write_model(tmp_path, family, **SIZES | changes)
    build_tokenizer().save_pretrained(tmp_path)
    seen = run_ranks(families.observe, world, tmp_path, parallel, engine_tensor)
    assert all(other == seen[0] for other in seen)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for number, prompt in enumerate(families.PROMPTS):
        ids, logprobs = seen[0][str(number)]
        expected = reference_logprobs(model, prompt + ids)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(logprobs).double(), expected, atol=2e-5, rtol=1e-5)


def test_the_decay_is_float32_in_a_model_in_bfloat16(tmp_path: Path) -> None:
    """Published folders have A_log in float32, and so has vLLM; the other weights have the model's type."""
    folder = tmp_path / "model"
    write_model(folder, "qwen3_5", **SIZES | {"layer_types": [*KINDS[::-1]]})
    build_tokenizer().save_pretrained(folder)
    (seen,) = run_ranks(families.types, 1, folder, tmp_path / "out")
    given = load_file(folder / "model.safetensors")["model.layers.0.linear_attn.A_log"]
    assert not torch.equal(given, given.bfloat16().float())
    assert seen["trainer before"] == seen["engine before"] == given.tolist()
    after = seen["trainer after"]
    assert seen["stepped"] and all(0 < abs(a - b) < 1e-3 for a, b in zip(given.tolist(), after, strict=True))
    assert seen["engine after"] == seen["checkpoint"] == seen["folder"] == after
    assert seen["types"] == [["torch.float32"] * 2, *[["torch.bfloat16"] * 2] * 2]
