import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_stppo.checkpoint import convert
from megatron_stppo.weights.sharding.hf_files import INDEX
from megatron_stppo.weights.sharding.hf_names import hf_shapes, read_shape
from tests.checkpoint.conversion import LAYOUT, import_and_export, write_too_much
from tests.ranks import run_ranks
from tests.rollout.vllm.tiny import TEMPLATE, build_tokenizer
from tests.weights.reshard.pieces import model_shape

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=6, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, moe_intermediate_size=12, tie_word_embeddings=True)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS, head_dim=16)),
}


def test_a_checkpoint_is_exported_bitwise_from_tensor_2_pipeline_2(tmp_path):
    for family, make in FAMILIES.items():
        torch.manual_seed(0)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))  # different values in biases and norms
        model.save_pretrained(tmp_path / family)
        (tmp_path / family / "tokenizer.json").write_text("{}")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "{{ tools[0] }}" + TEMPLATE}
    tokenizer.save_pretrained(tmp_path / "llama")
    names = run_ranks(import_and_export, LAYOUT.world, tmp_path, tuple(FAMILIES))[0]
    assert "failed" not in names
    for family in FAMILIES:
        original = load_file(tmp_path / family / "model.safetensors")
        exported = load_file(tmp_path / "out" / family / "model.safetensors")
        shape = read_shape(tmp_path / family)
        if family != "gpt_oss":  # of which one tensor has all experts
            assert {key: tuple(t.shape) for key, t in original.items()} == hf_shapes(shape)
        assert original.keys() == exported.keys()
        assert all(torch.equal(exported[key], original[key]) for key in original)
        for file in files_of_tokenizer(tmp_path / family):
            exported_file = tmp_path / "out" / family / file.relative_to(tmp_path / family)
            assert exported_file.read_bytes() == file.read_bytes()
        assert read_shape(tmp_path / "out" / family) == shape

        split = tmp_path / "split" / family
        files = set(json.loads((split / INDEX).read_text())["weight_map"].values())
        assert len(files) > 2 and all((split / name).exists() for name in files)
        reloaded = type(FAMILIES[family]()).from_pretrained(split)
        assert reloaded.dtype == torch.bfloat16
        reloaded.save_pretrained(tmp_path / "again" / family)  # names as in a checkpoint
        held = load_file(tmp_path / "again" / family / "model.safetensors")
        assert all(torch.equal(held[key], original[key].bfloat16()) for key in original)

    before, after = (AutoTokenizer.from_pretrained(tmp_path / f) for f in ("llama", "out/llama"))
    text = "caf\u00e9 \U0001f600 <|im_start|>\n\tx  <tool_call>"
    assert after(text)["input_ids"] == before(text)["input_ids"]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        given = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
        chat = [{"role": "user", "content": text}]
        assert after.apply_chat_template(chat, **given) == before.apply_chat_template(chat, **given)


def files_of_tokenizer(folder):
    """Return the files of a tokenizer that are in the folder."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/*")
    found = [path for name in names for path in folder.glob(name)]
    assert len(found) == (4 if folder.name == "llama" else 1)
    return found


def test_a_checkpoint_is_assembled_on_the_device_of_the_parameters(monkeypatch):
    # copies of a reshard stay on one device, so the target of parameters on a GPU must be there too
    class Given(Exception):
        pass

    def resharder(source, target, *_, **__):
        raise Given(*{tensor.device.type for tensor in target.values()})

    monkeypatch.setattr(convert, "Resharder", resharder)
    monkeypatch.setattr(convert.dist, "get_rank", lambda: 0)
    with pytest.raises(Given, match="meta"):
        parameters = {"weight": torch.empty(2, device="meta")}
        convert.gather(parameters, {}, model_shape(), {"model.norm.weight": (2,)}, ["model.norm.weight"])


def test_all_ranks_report_a_model_that_the_first_one_cannot_write(tmp_path):
    first, second = run_ranks(write_too_much, 2, tmp_path)
    assert first == second and "File too large" in first
