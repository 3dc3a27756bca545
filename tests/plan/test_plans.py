from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.plan import real_step, small_plans
from tests.plan.in_planner import command

EXAMPLES = Path(__file__).parents[2] / "examples"
# (folder, configuration, its plan, GPUs)
PLANNED = [
    ("qwen2.5-0.5b", "config.yaml", "plan.txt", 1),
    ("qwen2.5-7b", "config.yaml", "plan.txt", 8),
    ("bfcl", "config.yaml", "plan.txt", 8),
    ("qwen2.5-32b", "config.yaml", "plan.txt", 64),
    ("qwen2.5-32b", "lora.yaml", "lora_plan.txt", 8),
    ("qwen2.5-72b", "config.yaml", "plan.txt", 1024),
    ("llama-3.3-70b", "config.yaml", "plan.txt", 128),
    ("llama-3.3-70b", "lora.yaml", "lora_plan.txt", 16),
    ("qwen3-30b-a3b", "config.yaml", "plan.txt", 32),
    ("qwen3-30b-a3b", "lora.yaml", "lora_plan.txt", 8),
    ("qwen3-235b-a22b", "config.yaml", "plan.txt", 256),
    ("qwen3.5-9b", "config.yaml", "plan.txt", 8),
    ("qwen3.6-35b-a3b", "config.yaml", "plan.txt", 32),
    ("gpt-oss-20b", "config.yaml", "plan.txt", 16),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_stppo", "plan", *arguments],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
    )


def test_a_run_that_does_not_fit_exits_with_2_and_json_has_the_same_message(
    thin: Path, planner: ProcessPoolExecutor
) -> None:
    config = thin / "run.yaml"
    config.write_text(
        f"model: {{path: {thin}}}\n"
        "rollout: {max_context: 256, max_prompt_tokens: 128, max_turn_tokens: 64, tasks_per_iteration: 8}\n"
    )
    result = command(planner, str(config), "rollout.gpu_memory_utilization=0.0001", "--gpus", "2", "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 2
    assert result.stderr == f"megatron-stppo: {found['broken'][0]}\n"
    assert found["broken"][0].startswith("rollout.gpu_memory_utilization=0.0001: ")
    assert found["layout"]["data"] == 2
    (stage,) = found["stages"]
    assert stage["totals"]["update"] == sum(stage["phases"]["update"].values())


def test_an_impossible_layout_exits_with_2_and_without_a_plan(
    model: Path, planner: ProcessPoolExecutor
) -> None:
    config = model / "run.yaml"
    config.write_text(f"model: {{path: {model}}}\nparallel: {{tensor: 3}}\n")
    result = command(planner, str(config), "--gpus", "3")
    assert (result.returncode, result.stdout) == (2, "")
    assert "parallel.tensor=3 must divide model.num_attention_heads=4" in result.stderr


def test_each_broken_limit_names_the_field_that_helps(model: Path, planner: ProcessPoolExecutor) -> None:
    found = planner.submit(small_plans.limits, str(model)).result()
    assert found["all"] == []
    assert [line.partition("=")[0] for line in found["update"]] == ["model.recompute"]
    assert [line.partition("=")[0] for line in found["recomputed"]] == ["update.tokens_per_microbatch"]
    assert [line.partition("=")[0] for line in found["serving"]] == ["update.offload"]
    assert [line.partition("=")[0] for line in found["offloaded"]] == ["rollout.gpu_memory_utilization"]
    assert "parallel.pipeline" in {line.partition("=")[0] for line in found["resident"]}
    assert [line.partition("=")[0] for line in found["engine"]] == ["rollout.gpu_memory_utilization"]


def test_middle_stages_are_built_once(planner: ProcessPoolExecutor) -> None:
    ranks = planner.submit(small_plans.shared_kinds, (2, 4, 2)).result()
    assert ranks == [(0, {0: 4}), (4, {1: 4, 2: 4}), (12, {3: 4})]


@pytest.mark.parametrize("sizes", [(4, 1, 8), (4, 1, 2), (4, 2, 8), (2, 3, 4), (1, 1, 3)])
def test_microbatches_in_flight_are_those_of_megatrons_schedule(
    sizes: tuple[int, int, int], planner: ProcessPoolExecutor
) -> None:
    for ours, megatrons in planner.submit(small_plans.warm_ups, *sizes).result():
        assert ours == megatrons


def test_logits_in_float32_take_twice_the_memory_and_are_the_default(
    thin: Path, planner: ProcessPoolExecutor
) -> None:
    found = planner.submit(small_plans.head_types, str(thin)).result()
    assert found["auto"] == found["float32"]
    (of_float32, with_float32), (of_model, with_model) = found["float32"], found["model"]
    assert of_float32 == 2 * of_model
    assert with_float32 - with_model == pytest.approx(of_model, rel=0.1)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_formula_of_mfu_agrees_with_counted_flop(
    model: Path, planner: ProcessPoolExecutor, rank: int
) -> None:
    for what, (formula, counted) in planner.submit(small_plans.flop, str(model), rank).result().items():
        assert formula == pytest.approx(counted, rel=0.02), what


def test_a_reference_with_imported_adapters_has_those(thin: Path, planner: ProcessPoolExecutor) -> None:
    plain, imported = planner.submit(small_plans.references, str(thin)).result()
    adapters, own, frozen = plain
    assert own == 0 < adapters
    assert imported == (adapters, adapters, frozen)


def test_a_teacher_takes_the_memory_of_its_own_size(
    model: Path, planner: ProcessPoolExecutor, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 512, "vocab_size": 2048}
    for family in ("Llama", "Qwen3Moe"):
        real_step.write_model(tmp_path / family, family, **sizes)
    folders = tuple(str(tmp_path / family) for family in ("Llama", "Qwen3Moe"))
    for wanted, planned, weights in planner.submit(small_plans.teachers, str(model), folders).result():
        assert planned == pytest.approx(wanted / 2, rel=0.02) and weights == 2 * planned


def test_groups_that_are_connected_at_the_start_are_those_that_a_step_uses(
    model: Path, planner: ProcessPoolExecutor, tmp_path: Path
) -> None:
    real_step.write_model(tmp_path / "tied", num_hidden_layers=4, tie_word_embeddings=True)
    real_step.write_model(tmp_path / "experts", "Qwen3Moe", num_hidden_layers=1)
    folders = (str(tmp_path / "tied"), str(tmp_path / "experts"))
    for used, listed in planner.submit(small_plans.exchanging, *folders).result():
        assert used == listed
