import contextlib
import json
import math
import pickle

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from megatron_stppo.config import ConfigError
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_checkpoint import load_hf
from megatron_stppo.weights.sharding.hf_files import INDEX
from megatron_stppo.weights.sharding.hf_write import publish
from megatron_stppo.weights.sharding.spans import row_widths, training_spans, whole_spans
from tests.rollout.vllm.tiny import build_tokenizer
from tests.training.loop.canaries import Canary
from tests.weights.reshard.pieces import blank, checkpoint, cut, model_shape, padding_rows

SHAPE = model_shape(tied=True)
WIDTHS = row_widths(SHAPE)
SPANS = training_spans(SHAPE, Layout(2, 2, 1), 3, tied_copy=True)  # last stage, second tensor rank


def two_files(folder, held):
    """Write the checkpoint as two files with an index, as for large models."""
    weight_map = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(held)}
    for name in set(weight_map.values()):
        save_file({key: held[key] for key in held if weight_map[key] == name}, folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_a_rank_gets_its_rows_from_one_file_or_several_and_zeros_for_padding(tmp_path):
    held = checkpoint(SHAPE)
    expected = cut(SPANS, held, WIDTHS)
    assert padding_rows(SPANS, expected)  # 300 rows over 2 x 256
    for rows in padding_rows(SPANS, expected):
        rows.zero_()
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "split").mkdir()
    two_files(tmp_path / "split", held)
    for folder in (tmp_path, tmp_path / "split"):
        parameters = blank(SPANS, WIDTHS)
        load_hf(folder, SHAPE, SPANS, parameters)
        assert all(torch.equal(parameters[name], expected[name]) for name in SPANS)


def test_rows_are_cast_to_the_parameters_type_and_a_value_head_is_kept(tmp_path):
    save_file(checkpoint(SHAPE), tmp_path / "model.safetensors")
    spans = training_spans(SHAPE, Layout(), 0, head="none")
    parameters = blank(spans, WIDTHS, torch.bfloat16) | {"output_layer.weight": torch.full((1, 8), 5.0)}
    load_hf(tmp_path, SHAPE, spans, parameters, keep={"output_layer.weight"})
    assert parameters["decoder.final_layernorm.weight"].dtype == torch.bfloat16
    assert (parameters["output_layer.weight"] == 5.0).all()


def test_a_missing_tensor_or_file_or_a_wrong_size_is_named(tmp_path):
    key = "model.layers.3.mlp.up_proj.weight"
    held = checkpoint(SHAPE)
    save_file({k: v for k, v in held.items() if k != key}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"has no tensor '{key}'"):
        load_hf(tmp_path, SHAPE, SPANS, blank(SPANS, WIDTHS))
    save_file(held | {key: torch.zeros(12, 7)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"'{key}' has shape \[12, 7\]"):
        load_hf(tmp_path, SHAPE, SPANS, blank(SPANS, WIDTHS))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        load_hf(tmp_path, SHAPE, SPANS, blank(SPANS, WIDTHS))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor"):
        load_hf(tmp_path, SHAPE, SPANS, blank(SPANS, WIDTHS))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
def test_a_tensor_that_is_not_finite_is_named(tmp_path, value, place):
    held, key = checkpoint(SHAPE), "model.layers.3.self_attn.o_proj.weight"
    held[key][place] = value
    save_file(held, tmp_path / "model.safetensors")
    spans = whole_spans(SHAPE, {name: tuple(tensor.shape) for name, tensor in held.items()})
    with pytest.raises(ConfigError, match=rf"tensor '{key}' has NaN or infinity; fetch the folder again"):
        load_hf(tmp_path, SHAPE, spans, {name: torch.empty_like(tensor) for name, tensor in held.items()})


def test_an_index_must_name_every_tensor_and_only_files_in_its_folder(tmp_path):
    held = checkpoint(SHAPE)
    weight_map = two_files(tmp_path, held)
    key = "model.layers.3.mlp.up_proj.weight"
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {k: v for k, v in weight_map.items() if k != key}})
    )
    with pytest.raises(ConfigError, match=rf"holds the tensor '{key}', which model\.safetensors\.index"):
        load_hf(tmp_path, SHAPE, SPANS, blank(SPANS, WIDTHS))
    for name in (
        "../x.safetensors",
        "../../etc/passwd",
        "/etc/passwd",
        "a/../x.safetensors",
        "..",
        "",
        5,
        ["x"],
    ):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map | {key: name}}))
        with pytest.raises(ConfigError, match="outside the folder"):
            load_hf(tmp_path, SHAPE, SPANS, blank(SPANS, WIDTHS))
    for text in ("[]", '{"weight_map": 5}', '{"weight_map": ["x"]}', "[" * 100_000, "{"):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            load_hf(tmp_path, SHAPE, SPANS, blank(SPANS, WIDTHS))


def test_pickled_weights_are_never_loaded(tmp_path):
    canary = pickle.dumps(Canary(tmp_path / "alive"))
    (tmp_path / "pytorch_model.bin").write_bytes(canary)
    with pytest.raises(ConfigError, match="convert the weights to safetensors"):
        load_hf(tmp_path, SHAPE, SPANS, blank(SPANS, WIDTHS))
    (tmp_path / "model.safetensors").write_bytes(canary)
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        load_hf(tmp_path, SHAPE, SPANS, blank(SPANS, WIDTHS))
    assert not (tmp_path / "alive").exists()


def test_code_in_a_model_folder_is_not_run(tmp_path):
    """Checks the calls of the engine and of the cold start; tests/test_banned_calls.py allows no others."""
    build_tokenizer().save_pretrained(tmp_path)
    alive = tmp_path / "alive"
    for name in ("configuration_own", "tokenization_own"):
        (tmp_path / f"{name}.py").write_text(f"open({str(alive)!r}, 'w')\nclass Own: pass\n")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    given = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | given))
    own = {"model_type": "qwen3", "auto_map": {"AutoConfig": "configuration_own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert AutoConfig.from_pretrained(tmp_path, trust_remote_code=False).model_type == "qwen3"
    with contextlib.suppress(ValueError, OSError):  # refused, or read without the code
        AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    assert not alive.exists()


def test_a_folder_that_has_appeared_meanwhile_is_not_replaced_even_if_it_is_empty(tmp_path):
    partial, taken = tmp_path / "partial", tmp_path / "taken"
    partial.mkdir()
    taken.mkdir()
    with pytest.raises(OSError, match="has appeared meanwhile"):
        publish(partial, taken)
    assert partial.exists()
