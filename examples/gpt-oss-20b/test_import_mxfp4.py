"""The weights of examples/gpt-oss-20b/import_mxfp4.py are those that transformers decodes, bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from import_mxfp4 import decoded, import_mxfp4, main
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_stppo.config import ConfigError
from megatron_stppo.validation.model_folder import check_weights
from megatron_stppo.weights.sharding.hf_names import hf_shapes, read_shape
from tests.families.gpt_oss.test_description import FIELDS

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 3}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}, "torch_dtype": "float32"}


def write(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model of one layer in MXFP4; return its tensors."""
    folder.mkdir()
    fields = FIELDS | SIZES | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    shapes, generator = hf_shapes(read_shape(folder)), torch.Generator().manual_seed(0)
    (folder / "config.json").write_text(json.dumps(fields | MXFP4))
    (folder / "tokenizer.json").write_text("{}")
    given = {name: torch.randn(of, generator=generator).bfloat16() for name, of in shapes.items()}
    given = {name: x for name, x in given.items() if ".experts." not in name}
    at = "model.layers.0.mlp.experts."
    for name, rows, groups in (("gate_up_proj", 128, 1), ("down_proj", 32, 2)):
        numbers = {"_blocks": (0, 256, (3, rows, groups, 16)), "_scales": (100, 140, (3, rows, groups))}
        for suffix, (low, high, size) in numbers.items():
            drawn = torch.randint(low, high, size, generator=generator)
            given[f"{at}{name}{suffix}"] = drawn.to(torch.uint8)
        given[f"{at}{name}_bias"] = torch.randn(3, rows, generator=generator).bfloat16()
    save_file(given, folder / "model.safetensors")
    return given


def test_experts_are_decoded_and_all_else_is_copied(tmp_path: Path, capsys: Any) -> None:
    given = write(tmp_path / "old")
    with pytest.raises(ConfigError, match=r"import_mxfp4.py .*old FOLDER"):
        read_shape(tmp_path / "old")
    assert main([str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert re.search(r"wrote .*/new: gpt_oss, 1 layers, \d+ tokens, bfloat16", capsys.readouterr().err)
    check_weights("model.path", tmp_path / "new", read_shape(tmp_path / "new"))
    found = load_file(tmp_path / "new" / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        theirs = convert_moe_packed_tensors(given.pop(f"{key}_blocks"), given.pop(f"{key}_scales"))
        assert torch.equal(found.pop(key), theirs)
    assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)
    fields = json.loads((tmp_path / "new" / "config.json").read_text())
    assert fields["dtype"] == "bfloat16" and "quantization_config" not in fields
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"


def test_the_first_number_of_a_byte_is_in_its_low_bits() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0xF1  # 0.5, then -6
    found = decoded(blocks, torch.tensor([[128]], dtype=torch.uint8))
    assert found[0, :3].tolist() == [1.0, -12.0, 0.0] and found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": None}, "quant_method=mxfp4 is needed"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8' is not supported"),
        ({"hidden_size": 64}, "has shape .* its config.json gives"),
    ],
)
def test_another_folder_is_refused(tmp_path: Path, changes: Any, message: str, capsys: Any) -> None:
    write(tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert main([str(tmp_path / "old"), str(tmp_path / "new")]) == 2
    assert re.search(rf"^megatron-stppo: {tmp_path}/old: .*{message}", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gate_up_proj_blocks", torch.zeros(0, 128, 1, 16, dtype=torch.uint8), "does not fit its scales"),
        ("down_proj_scales", torch.zeros(3, 32, dtype=torch.uint8), "does not fit its scales"),
        ("down_proj_scales", torch.full((3, 32, 2), 255, dtype=torch.uint8), "has scales above 252"),
        ("down_proj_bias", None, "no file has the tensor"),
    ],
)
def test_damaged_tensors_are_refused(tmp_path: Path, name: str, changed: Any, message: str) -> None:
    given = write(tmp_path / "old")
    key = f"model.layers.0.mlp.experts.{name}"
    left = {other: x for other, x in given.items() if other != key}
    save_file(left | ({} if changed is None else {key: changed}), tmp_path / "old" / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/old: .*{message}"):
        import_mxfp4(tmp_path / "old", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
