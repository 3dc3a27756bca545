import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_stppo.config import ConfigError
from megatron_stppo.convert import export_hf
from megatron_stppo.model.hf_checkpoint import INDEX, load_hf
from megatron_stppo.model.hf_names import hf_shapes, read_shape
from megatron_stppo.model.spans import row_widths, training_layouts, training_spans
from megatron_stppo.parallel.layout import Layout
from tests.ranks import run_ranks
from tests.reshard.pieces import blank

LAYOUT = Layout(2, 2, 1)
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)),
}


def import_and_export(folder):
    """load_hf on TP2 x PP2, export_hf in one file, in several, in bfloat16, and onto an existing folder."""
    for family in FAMILIES:
        template = folder / family
        shape = read_shape(template)
        widths, layouts = row_widths(shape), training_layouts(shape, LAYOUT)
        spans = training_spans(shape, LAYOUT, dist.get_rank(), tied_copy=True)
        parameters = blank(spans, widths)
        load_hf(template, spans, parameters)
        if shape.tied and dist.get_rank() == 3:  # must not matter: the first stage's embedding is the source
            parameters["output_layer.weight"].zero_()
        export_hf(folder / "out" / family, parameters, layouts, shape, template)
        with pytest.raises(ConfigError, match="exists; name another folder"):
            export_hf(folder / "out" / family, parameters, layouts, shape, template)
        half = {name: tensor.bfloat16() for name, tensor in parameters.items()}
        (folder / "split" / family).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        export_hf(folder / "split" / family, half, layouts, shape, template, file_bytes=20000, overwrite=True)
        with pytest.raises(ConfigError, match=r"No such file .*nowhere"):
            export_hf(folder / "failed", parameters, layouts, shape, folder / "nowhere")
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_bitwise_from_tensor_2_pipeline_2(tmp_path):
    for family, make in FAMILIES.items():
        torch.manual_seed(0)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))  # biases and norms that are not all alike
        model.save_pretrained(tmp_path / family)
        (tmp_path / family / "tokenizer.json").write_text("{}")
    names = run_ranks(import_and_export, LAYOUT.world, tmp_path)[0]
    assert "failed" not in names
    for family in FAMILIES:
        original = load_file(tmp_path / family / "model.safetensors")
        exported = load_file(tmp_path / "out" / family / "model.safetensors")
        shape = read_shape(tmp_path / family)
        assert {key: tuple(t.shape) for key, t in original.items()} == hf_shapes(shape)
        assert original.keys() == exported.keys()
        assert all(torch.equal(exported[key], original[key]) for key in original)
        assert (tmp_path / "out" / family / "tokenizer.json").read_text() == "{}"
        assert read_shape(tmp_path / "out" / family) == shape

        split = tmp_path / "split" / family
        files = set(json.loads((split / INDEX).read_text())["weight_map"].values())
        assert len(files) > 2 and all((split / name).exists() for name in files)
        reloaded = type(FAMILIES[family]()).from_pretrained(split)
        assert reloaded.dtype == torch.bfloat16
        held = reloaded.state_dict()
        assert all(torch.equal(held[key], original[key].bfloat16()) for key in original)
