"""A step of adapters under several layouts, compared with the float64 reference of test_layouts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import parametrize

from megatron_stppo.config.model import LINEAR
from tests.ranks import run_ranks
from tests.training.update import adapting, layouts, test_layouts
from tests.training.update.imported import write_adapter

ATTENTION = ["q_proj", "v_proj", "o_proj"]
# (family, ranks, parallel:, whether optimizer states, and so gradients, are sharded, targets, recomputation)
CASES: dict[str, tuple[str, int, dict[str, Any], bool, Any, str]] = {
    "tensor_sequence": ("qwen3", 2, {"tensor": 2, "sequence": True}, False, "all-linear", "full"),
}
MORE: dict[str, tuple[str, int, dict[str, Any], bool, Any, str]] = {
    "virtual_tensor_sequence": (
        *("qwen3", 4, {"tensor": 2, "pipeline": 2, "virtual": 2, "sequence": True}, False),
        *("all-linear", "full"),
    ),
    "one": ("qwen3", 1, {}, False, "all-linear", "none"),
    "one_recomputed": ("qwen2", 1, {}, False, ["down_proj"], "selective"),
    "tensor": ("qwen3", 2, {"tensor": 2}, False, "all-linear", "none"),
    "heads_cut": ("llama", 2, {"tensor": 2}, False, ["q_proj", "v_proj", "gate_proj"], "none"),
    "context": ("qwen3", 2, {"context": 2}, False, "all-linear", "none"),
    "pipeline": ("qwen2", 2, {"pipeline": 2}, False, ATTENTION, "full"),
    "data": ("qwen3", 2, {}, True, "all-linear", "none"),
    "experts": ("mixtral", 2, {"tensor": 2, "sequence": True}, False, "all-linear", "none"),
    "sinks": ("gpt_oss", 2, {"tensor": 2, "sequence": True}, False, "all-linear", "selective"),
}


class Sum(torch.nn.Module):
    """W + scale * B A, of which A and B are trained."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a.double()), torch.nn.Parameter(b.double())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + adapting.ALPHA / adapting.RANK * self.b @ self.a


def add_adapters(model: Any, file: Path) -> dict[str, torch.nn.Parameter]:
    """Freeze a model of transformers, add the file's adapters, and return them by their checkpoint names."""
    model.requires_grad_(False)
    given, trained = load_file(file), {}
    for key in given:
        if key.endswith(".lora_A.weight"):
            name = key.removesuffix(".lora_A.weight")
            term = Sum(given[key], given[f"{name}.lora_B.weight"])
            parametrize.register_parametrization(model.get_submodule(name), "weight", term)
            trained |= {key: term.a, f"{name}.lora_B.weight": term.b}
    return trained


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_step_of_adapters_equals_float64_reference(tmp_path: Path, case: str) -> None:
    family, world, parallel, distributed, targets, recompute = (CASES | MORE)[case]
    layouts.write_model(tmp_path / "model", family)
    given = (str(tmp_path / "model"), parallel, distributed, test_layouts.ST_PPO, str(tmp_path))
    fused = case == "tensor_sequence"  # frozen weights then have no main gradient to add to
    results = run_ranks(adapting.steps, world, *given, targets, recompute, None, fused)
    compare(results, tmp_path, distributed)


# {name: (family, ranks, parallel:, targets)}
IMPORTED: dict[str, tuple[str, int, dict[str, Any], list[str]]] = {
    "pipeline": ("qwen3", 2, {"pipeline": 2}, list(LINEAR)),
}
MORE_IMPORTED: dict[str, tuple[str, int, dict[str, Any], list[str]]] = {
    "virtual_tensor_sequence": (
        *("qwen3", 4, {"tensor": 2, "pipeline": 2, "virtual": 2, "sequence": True}),
        list(LINEAR),
    ),
    "tensor": ("qwen2", 2, {"tensor": 2}, list(LINEAR)),
    "heads_cut": ("llama", 2, {"tensor": 2}, ["q_proj", "v_proj", "gate_proj"]),
    "experts": ("mixtral", 2, {"tensor": 2, "sequence": True}, ATTENTION),
}


@pytest.mark.parametrize(
    "case", [*IMPORTED, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_IMPORTED)]
)
def test_step_of_imported_adapters_equals_float64_reference(tmp_path: Path, case: str) -> None:
    family, world, parallel, targets = (IMPORTED | MORE_IMPORTED)[case]
    layouts.write_model(tmp_path / "model", family)
    tensors = write_adapter(tmp_path / "given", tmp_path / "model", target_modules=targets)
    given = (str(tmp_path / "model"), parallel, False, test_layouts.ST_PPO, str(tmp_path))
    results = run_ranks(adapting.steps, world, *given, targets, "none", str(tmp_path / "given"))
    compare(results, tmp_path, distributed=False)
    for role in ("actor", "critic"):
        held = load_file(tmp_path / f"{role}.safetensors")
        assert held.keys() == tensors.keys()
        assert all(torch.equal(held[key], tensors[key]) for key in tensors), "they are imported bit for bit"


def compare(results: list[dict[str, Any]], tmp_path: Path, distributed: bool) -> None:
    """Compare what adapting.steps returned and wrote with a step of the model in float64."""
    numbers, own_T = results[0]["numbers"], torch.tensor(results[0]["own"])
    for role in ("actor", "critic"):
        model = test_layouts.in_float64(tmp_path / "model")
        trained = add_adapters(model, tmp_path / f"{role}.safetensors")
        expected = test_layouts.numbers_of(model)
        if role == "actor":
            torch.testing.assert_close(own_T.double(), expected["logprob_T"], atol=2e-5, rtol=0)
        names = [name for name in expected if name.startswith(f"{role}/") and name in numbers]
        assert len(names) > 1
        for name in names:
            assert numbers[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-6), name
        if not distributed:
            ours, gradients = load_file(tmp_path / f"grad_{role}.safetensors"), expected[f"{role} gradients"]
            assert ours.keys() == trained.keys()
            for name, parameter in trained.items():
                gradient = gradients[parameter]
                apart = (ours[name].double() - gradient).norm() / gradient.norm()
                assert apart < 1e-4, (name, float(apart))
    for result in results:
        assert result["numbers"] == numbers, "every rank reports the same numbers"
        assert result["fresh"] == 0.0, "the actor begins as the reference"
        size = result["bytes"]
        trained = size["critic, trained"] + size["reference, own"]
        assert size["all"] == size["actor"] + trained, "three models share one trunk"
