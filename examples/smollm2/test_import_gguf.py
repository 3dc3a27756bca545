"""Files of every family become the folders that they were made of; wrong files one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from import_gguf import import_gguf, main
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_names import read_shape
from tests.rollout.vllm.tiny import build_tokenizer


def made(root: Path, name: str, **given: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a file of the family, and the weights that it was made of."""
    fields, weights = gguf_files.model(root / "source", name)
    architecture = gguf_files.FAMILIES[name][1]
    tensors = gguf_files.in_file(fields, weights, architecture) | given.pop("tensors", {})
    gguf_files.write(root / "m.gguf", fields, tensors, architecture=architecture, **given)
    return root / "m.gguf", weights


@pytest.mark.parametrize("name", gguf_files.FAMILIES)
def test_weights_and_shape_are_those_that_the_file_was_made_of(tmp_path: Path, name: str) -> None:
    file, weights = made(tmp_path, name)
    import_gguf(file, tmp_path / "new", torch.float32)
    assert read_shape(tmp_path / "new") == read_shape(tmp_path / "source")
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert [key for key in found if not torch.equal(found[key], weights[key])] == []


@pytest.mark.parametrize("name", ["tied", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
def test_quantised_weights_are_those_of_transformers_own_import(
    tmp_path: Path, name: str, kind: GGMLQuantizationType
) -> None:
    file, weights = made(tmp_path, name, kind=kind)
    import_gguf(file, tmp_path / "new", torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.bfloat16).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.bfloat16
    ).state_dict()
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert not torch.equal(ours["model.embed_tokens.weight"], weights["model.embed_tokens.weight"].bfloat16())


def test_tokenizer_template_and_end_token_are_the_models(tmp_path: Path) -> None:
    file, _ = made(tmp_path, "tied", pre="gpt-2")
    import_gguf(file, tmp_path / "new", torch.bfloat16)
    tokenizer, original = AutoTokenizer.from_pretrained(tmp_path / "new"), build_tokenizer()
    chat = [{"role": "user", "content": "Which city? 12345"}]
    assert tokenizer.apply_chat_template(chat) == original.apply_chat_template(chat)
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_tokenizer_of_smollm_divides_numbers_into_digits(tmp_path: Path) -> None:
    file, _ = made(tmp_path, "tied", pre="smollm")
    import_gguf(file, tmp_path / "new", torch.bfloat16)
    cut = AutoTokenizer.from_pretrained(tmp_path / "new").backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in cut.pre_tokenize_str("a 123")] == ["a", "Ġ", "1", "2", "3"]


STRING, FLOAT, WHOLE = GGUFValueType.STRING, GGUFValueType.FLOAT32, GGUFValueType.UINT32
ODD = np.zeros((64, 64), dtype=np.float32)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"llama__rope__scaling__type": ("yarn", STRING)}, "llama.rope.scaling.type='yarn' is not supported"),
        ({"llama__logit_scale": (2.0, FLOAT)}, "llama.logit_scale=2.0 is not supported"),
        ({"llama__rope__dimension_count": (8, WHOLE)}, "llama.rope.dimension_count=8 is not supported"),
        ({"pre": "unheard"}, "tokenizer.ggml.pre='unheard' is not supported"),
        ({"split__count": (2, WHOLE)}, "is one of 2 parts"),
        ({"tensors": {"blk.0.attn_q.bias": ODD[0]}}, "has a tensor model.layers.0.self_attn.q_proj.bias"),
        ({"tensors": {"blk.0.attn_k.weight": ODD}}, "tensor blk.0.attn_k.weight has the shape [64"),
        ({"tensors": {"blk.0.post_norm.weight": ODD}}, "tensor 'blk.0.post_norm' is not known"),
        ({"tensors": {"rope_freqs.weight": ODD[0, :8] + 3}}, "rope_freqs.weight is not the scaling llama3"),
    ],
)
def test_a_file_that_would_become_another_model_is_refused(
    tmp_path: Path, given: dict[str, Any], problem: str
) -> None:
    file, _ = made(tmp_path, "tied", **given)
    refused(file, tmp_path, problem)


@pytest.mark.parametrize("content", [b"", b"GGUF" + b"\xff" * 40])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, capsys: Any) -> None:
    (file := tmp_path / "m.gguf").write_bytes(content)
    refused(file, tmp_path, problem := "is not a complete GGUF file")
    assert main([str(file), str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.startswith(f"megatron-stppo: FILE={file}: {problem}")


def test_a_file_that_was_cut_or_has_another_architecture_is_refused(tmp_path: Path) -> None:
    file, _ = made(tmp_path, "qwen2")
    whole = file.read_bytes()
    file.write_bytes(whole[:-70_000])
    refused(file, tmp_path, "is not a complete GGUF file")
    file.write_bytes(whole.replace(b"qwen2", b"phi99"))
    refused(file, tmp_path, "architecture 'phi99' is not supported; choose one of ['llama', 'qwen2', 'qwen3'")
    refused(tmp_path / "none.gguf", tmp_path, "cannot be read (No such file or directory)")


def refused(file: Path, root: Path, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        import_gguf(file, root / "new", torch.bfloat16)
    message = str(raised.value)
    assert message.startswith(f"FILE={file}: {problem}"), message
    assert len(message.splitlines()) == 1
    assert sorted(path.name for path in root.iterdir() if path.suffix != ".gguf") in ([], ["source"])
