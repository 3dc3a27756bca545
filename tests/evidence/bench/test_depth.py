from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_stppo.config import Config, ConfigError, ParallelConfig
from megatron_stppo.evidence.bench.depth import default_layers, reduced
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_names import read_shape
from tests.evidence.checks import bench
from tests.ranks import run_ranks
from tests.weights.reshard.pieces import model_shape


def of(tmp_path: Path, **model: object) -> Config:
    path = Path(bench.write(tmp_path / "model", num_hidden_layers=6))
    (path / "tokenizer.json").write_text("{}")
    return Config.model_validate({"model": {"path": path} | model, "run": {"root": tmp_path / "runs"}})


def test_a_cut_model_has_its_own_settings_and_links_to_the_rest(tmp_path: Path) -> None:
    config = of(tmp_path, critic_path=tmp_path / "model")
    cut = reduced(config, 2).model
    assert cut.path == cut.critic_path and cut.reference_path is None
    assert read_shape(cut.path).layers == 2
    assert len(json.loads((cut.path / "config.json").read_text())["layer_types"]) == 2
    assert (cut.path / "tokenizer.json").is_symlink() and (cut.path / "model.safetensors").is_symlink()
    assert read_shape(config.model.path).layers == 6
    assert reduced(config, 0) is config
    assert reduced(config, 6).model == config.model, "nothing is left out"
    (config.model.path / "tokenizer.json").write_text("{ }")
    assert reduced(config, 2).model.path != cut.path, "the folder of other files is not used"


def test_a_cut_adapter_has_no_other_layers_and_no_hash(tmp_path: Path) -> None:
    names = [f"base_model.model.model.layers.{n}.mlp.up_proj.lora_A.weight" for n in range(6)]
    folder = tmp_path / "adapter"
    folder.mkdir()
    tensors = {name: torch.full((2, 3), float(n)) for n, name in enumerate(names)}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"base_sha256": "0" * 64})
    (folder / "adapter_config.json").write_text("{}")
    lora = {"rank": 2, "alpha": 2, "targets": ["up_proj"], "path": folder}
    path = reduced(of(tmp_path, lora=lora), 3).model.lora.path
    assert path is not None
    held = load_file(path / "adapter_model.safetensors")
    assert sorted(held) == names[:3] and held[names[2]][0, 0] == 2
    assert b"base_sha256" not in (path / "adapter_model.safetensors").read_bytes()
    assert (path / "adapter_config.json").is_symlink()


def test_the_default_is_the_least_depth_from_four_that_the_stages_can_have(tmp_path: Path) -> None:
    def least(layers: int, world: int, **parallel: int) -> int:
        layout = Layout.of_world(world, ParallelConfig(**parallel))
        return default_layers(model_shape(layers=layers), layout)

    assert least(28, 1) == 4 and least(3, 1) == 3
    assert least(28, 8, pipeline=8) == 8 and least(6, 4, pipeline=4) == 4
    assert least(30, 3, pipeline=3) == 6
    with pytest.raises(ConfigError, match="pipeline"):
        other = of(tmp_path).model_copy(update={"parallel": ParallelConfig(pipeline=1, virtual=2)})
        reduced(other, 3)


def test_other_ranks_wait_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = of(tmp_path)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="all nodes share"):
        reduced(config, 2, wait=0.0)
    monkeypatch.setenv("RANK", "0")
    first = reduced(config, 2)
    monkeypatch.setenv("RANK", "1")
    assert reduced(config, 2, wait=0.0) == first


def test_a_cut_model_is_trained_like_any_other(tmp_path: Path) -> None:
    path = reduced(of(tmp_path), 2).model.path
    (found,) = run_ranks(bench.examine, 1, "optimizer", str(path), ("",), {})
    assert bench.verdicts(found) == {"": ["ok", "ok"]}, found
