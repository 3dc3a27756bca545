"""tools/show_reshard_plan.py on a model whose bytes can be counted by hand."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

from megatron_stppo.sharding.hf_names import hf_shapes, read_shape
from tools import show_reshard_plan

ROOT = Path(__file__).parents[2]
SIZES = {"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 2, "intermediate_size": 12, "vocab_size": 300}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | SIZES))
    return tmp_path


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(model: Path, *arguments: str) -> Done:
    """Run the tool in this process."""
    out, error = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        code = show_reshard_plan.main([str(model), *arguments])
    return Done(code, out.getvalue(), error.getvalue())


def test_the_tool_runs_in_a_process_of_its_own(model: Path) -> None:
    line = [sys.executable, str(ROOT / "tools/show_reshard_plan.py"), str(model), "--ranks", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("--ranks=0 must be at least 1")


def planned(model: Path, *arguments: str) -> dict:
    done = run(model, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_tensor_ranks_that_each_serve_the_whole_model_exchange_their_halves(model: Path) -> None:
    sizes = hf_shapes(read_shape(model)).values()
    matrices, norms = (2 * sum(prod(s) for s in sizes if len(s) == dims) for dims in (2, 1))
    found = planned(model, "--train", "tensor=2", "--ranks", "2", "--engine-tensor", "1")
    assert found["moved"] == found["least"] == matrices and found["between_nodes"] == 0
    assert found["at_home"] == matrices + 2 * norms  # a half each; every norm on both
    # embedding and head are padded from 300 to 512 rows: rank 0 holds 256 true rows of each, rank 1 44
    assert found["busiest_rank"] == matrices // 2 + 2 * (256 - 44) * 8 * 2 // 2
    apart = planned(
        model, "--train", "tensor=2", "--ranks", "2", "--engine-tensor", "1", "--ranks-per-node", "1"
    )
    assert apart["between_nodes"] == apart["moved"] == matrices
    assert apart["busiest_node"] == found["busiest_rank"]
    wide = planned(model, "--train", "tensor=2", "--ranks", "2", "--engine-tensor", "1", "--dtype", "float32")
    assert wide["moved"] == 2 * found["moved"]


@pytest.mark.parametrize(
    ("train", "ranks"),
    [
        ("tensor=2,pipeline=2", 4),
        ("pipeline=2,virtual=2", 4),
        ("tensor=2,context=2,pipeline=2,first_stage_layers=1", 8),
    ],
)
def test_no_layout_moves_more_than_the_bound(model: Path, train: str, ranks: int) -> None:
    for engine in (1, 2):
        found = planned(model, "--train", train, "--ranks", str(ranks), "--engine-tensor", str(engine))
        assert found["moved"] == found["least"] > 0 and found["ratio"] == 1


def test_the_table_shows_the_numbers_of_the_json(model: Path) -> None:
    found = planned(model, "--train", "tensor=2", "--ranks", "4")
    text = run(model, "--train", "tensor=2", "--ranks", "4").stdout
    assert "tensor=2 on 4 ranks -> 2 engines of 2, bfloat16" in text
    held = {"same rank": found["at_home"], "same node": found["moved"], "other node": 0}
    for pair, size in held.items():
        assert any(pair in line and f" {size:,} " in line for line in text.splitlines())
    assert f"{found['copies']:,} copies" in text
    assert f"lower bound {found['least']:,}: 1.000 x" in text


@pytest.mark.parametrize(("sync", "numbers"), [("merged", 480), ("adapter", 232)])
def test_after_an_update_of_adapters_only_their_rows_are_planned(
    model: Path, sync: str, numbers: int
) -> None:
    # numbers per layer: 8 * (8 + 4 + 4 + 8) + 3 * 8 * 12 of the weights; with rank 2, those of A and B are
    # 2 * (16 + 12 + 12 + 16 + 3 * 20)
    found = planned(model, "--ranks", "1", "--lora", f"rank=2,sync={sync}")
    assert found["at_home"] == 4 * numbers * 2 and found["moved"] == 0


def test_experts_are_planned_too(tmp_path: Path) -> None:
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(SIZES | experts))
    train = ("--train", "pipeline=2,expert=2", "--ranks", "4", "--engine-tensor", "1")
    found = planned(tmp_path, *train)
    sizes = hf_shapes(read_shape(tmp_path)).values()
    # every rank serves everything; it lacks the half of the other stage, and half of its own experts
    assert found["moved"] + found["at_home"] == 4 * 2 * sum(map(prod, sizes))
    assert found["moved"] == found["least"] > found["at_home"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--train", "tensr=2", "--ranks", "2"], "parallel.tensr=2: no such field; did you mean"),
        (["--train", "tensor", "--ranks", "2"], "--train 'tensor' is not AXIS=NUMBER; for example"),
        (
            ["--train", "tensor=3", "--ranks", "3"],
            "parallel.tensor=3 must divide model.num_attention_heads=4",
        ),
        (["--train", "tensor=2", "--ranks", "3"], "parallel.tensor=2 * parallel.pipeline=1 must divide"),
        (
            ["--train", "pipeline=3", "--ranks", "3"],
            "parallel.pipeline=3 must divide model.num_hidden_layers",
        ),
        (
            ["--ranks", "4", "--engine-tensor", "3"],
            "rollout.engine_tensor=3 must divide the number of ranks 4",
        ),
        (["--ranks", "4", "--engine-tensor", "0"], "rollout.engine_tensor=0: "),
        (["--ranks", "0"], "--ranks=0 must be at least 1"),
        (["--ranks", "1", "--lora", "rank"], "--lora 'rank' is not FIELD=VALUE; for example"),
        (["--ranks", "1", "--lora", "sync=adapter"], "model.lora.sync=adapter: with model.lora.rank=0 all"),
    ],
)
def test_wrong_arguments_give_one_line_and_exit_code_2(model: Path, arguments: list[str], says: str) -> None:
    done = run(model, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(says) and done.stderr.count("\n") == 1


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--ranks", "2")
    assert done.returncode == 2 and "config.json unreadable" in done.stderr
