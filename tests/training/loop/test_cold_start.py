"""A cold start of the real program: what it writes, and when it writes nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rollout.vllm.tiny import build_model
from tests.training.loop import small_run

ROW = {
    "prompt": [{"role": "user", "content": "Which city is number 1?"}],
    "segments": [{"text": "<answer>Rome</answer>", "kind": "turn"}],
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose cold start has written root/out."""
    root = tmp_path_factory.mktemp("cold")
    config = small_run.write(root)
    (root / "demonstrations.jsonl").write_text((json.dumps(ROW) + "\n") * 8)
    done = start(config, "out", "environment.kind=search", "cold_start.episodes=5").succeeded()
    (root / "stderr").write_text(done.stderr)
    return config


def start(config: Path, output: str, *overrides: str, ranks: int = 2) -> small_run.Done:
    root = config.parent
    given = (f"data.demonstrations={root}/demonstrations.jsonl", f"cold_start.output={root}/{output}")
    more = ("cold_start.batch_tokens=75", f"parallel.tensor={ranks}", *overrides)
    return small_run.run("cold-start", config, *given, *more, ranks=ranks)


def changed(root: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Return a copy of the model's folder with changed weights."""
    shutil.copytree(root / "model", root / "changed", dirs_exist_ok=True)
    weights = load_file(root / "model" / "model.safetensors")
    change(weights)
    save_file(weights, root / "changed" / "model.safetensors", {"format": "pt"})
    return root / "changed"


def test_the_loss_of_turns_and_episodes_with_the_written_model_are_shown(config: Path) -> None:
    said = (config.parent / "stderr").read_text()
    steps = re.findall(r"cold start \d/4: loss ([0-9.]+) nats/token, ([0-9.]+) of turns alone", said)
    assert len(steps) == 2 and float(steps[1][1]) < float(steps[0][1])
    _, found, episodes = said.partition(f"done; the model is {config.parent}/out\n")
    assert found and len(re.findall(r"^--- (?:ok|wrong|truncated), reward", episodes, re.MULTILINE)) == 3
    assert len(re.findall(r"<\|im_start\|>user\nWhich city.*\n.*assistant\n\n\[turn\] ", episodes)) == 3
    assert "5 episodes of data.train at rollout.temperature=1: exact match 0.000, valid actions" in episodes


def test_every_weight_of_gated_delta_nets_is_trained(config: Path) -> None:
    root = config.parent
    build_model(root / "hybrid", "qwen3_5")
    output, without = root / "hybrid-out", "cold_start.episodes=0"
    given = (f"model.path={root}/hybrid", without, "model.dtype=bfloat16")
    start(config, output.name, *given, ranks=1).succeeded()
    before, after = (load_file(folder / "model.safetensors") for folder in (root / "hybrid", output))
    assert not {key for key in before if torch.equal(before[key].to(after[key].dtype), after[key])}
    assert {key for key, x in after.items() if x.dtype == torch.float32} == {
        key for key in after if key.endswith(".A_log")
    }


def test_a_weight_that_is_not_finite_is_named_by_all_ranks_and_nothing_is_written(config: Path) -> None:
    def poison(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.down_proj.weight"][3, -1] = float("nan")  # a column of the second rank

    done = start(config, "none", f"model.path={changed(config.parent, poison)}", "cold_start.episodes=0")
    assert done.returncode != 0 and not (config.parent / "none").exists()
    line = (
        "/changed: tensor 'model.layers.1.mlp.down_proj.weight' has NaN or infinity; fetch the folder again"
    )
    first = f"megatron-stppo: {config.parent}{line}"  # of the first rank
    assert any(said.startswith(first) for said in done.stderr.splitlines()), done.stderr[-3000:]


def test_a_cold_start_without_a_finite_step_writes_nothing(config: Path) -> None:
    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] *= 3e38  # its products are above the largest float32

    folder = changed(config.parent, enlarge)
    for budget, line in (
        (1, "2 of 4 steps were not finite, run.nonfinite_budget=1; nothing is written; lower cold_start.lr"),
        (9, "4 of 4 steps were not finite, run.nonfinite_budget=9; nothing is written; lower cold_start.lr"),
    ):
        given = (f"run.nonfinite_budget={budget}", "cold_start.episodes=0")
        done = start(config, "none", f"model.path={folder}", *given, ranks=1)
        assert done.returncode != 0 and not (config.parent / "none").exists()
        assert f"megatron-stppo: {line}" in done.stderr, done.stderr[-3000:]
