"""A checkpoint loaded in another layout gives the same weights and the same next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.update import layouts, relayout

# model, the layout that saves, the layout that loads, rank of the adapters or 0; two ranks
MOVES = [
    ("qwen3", {"pipeline": 2}, {"tensor": 2}, 0),
    ("qwen3_moe", {}, {"expert": 2}, 0),
    ("qwen3", {"pipeline": 2}, {"tensor": 2}, 4),
]
MORE = [
    ("qwen3", {"tensor": 2}, {}, 0),
    ("qwen3_moe", {"expert": 2}, {}, 0),
    ("qwen3_moe", {"expert": 2}, {"tensor": 2, "sequence": True}, 0),
    ("qwen3", {"tensor": 2, "sequence": True}, {}, 4),
]


@pytest.mark.parametrize("moves", [MOVES, pytest.param(MORE, marks=pytest.mark.long)])
def test_weights_are_bitwise_equal_and_the_next_step_is_equal_up_to_rounding(
    moves: list[Any], tmp_path: Path
) -> None:
    for family in ("qwen3", "qwen3_moe"):
        layouts.write_model(tmp_path / family, family)
    layouts.write_model(tmp_path / "other", "qwen3", initializer_range=0.2)
    counted = run_ranks(relayout.three_steps, 2, str(tmp_path), moves, timeout=280)
    assert counted == [[2] * len(moves)] * 2
    for number, move in enumerate(moves):
        saved, loaded, stayed, moved = (
            load_file(tmp_path / str(number) / folder / "model.safetensors")
            for folder in ("saved", "loaded", "stayed", "moved")
        )
        assert all(torch.equal(saved[key], loaded[key]) for key in saved), move
        apart = sum(float((moved[key] - stayed[key]).abs().sum()) for key in saved)
        step = sum(float((stayed[key] - saved[key]).abs().sum()) for key in saved)
        assert apart < 1e-4 * step, (move, "Adam's moments and its count of steps move too")
