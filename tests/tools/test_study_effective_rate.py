"""tools/study/effective_rate.py and applied.py on numbers that can be worked out by hand."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.study.applied import FOLLOWING, applied_shares, gradient_table
from tools.study.effective_rate import (
    compared,
    correlation,
    draw_effective_rate,
    effective_rate,
    kind,
    levels,
    rate_table,
)

Row = dict[str, Any]


def run(algorithm: str, scale: float, final: float, setting: str = "harsh_2", seed: int = 0) -> Row:
    return {
        "setting": setting,
        "algorithm": algorithm,
        "seed": seed,
        "correction_scale": scale,
        "final": final,
    }


# effective rates of 6e-4, 3e-4 and 1.5e-4; each halving adds 0.2
LINE = [run("ppo", 1, 0.4), run("ppo", 1, 0.6, "harsh_2_half"), run("s_ppo", 0.25, 0.8)]


def test_a_corrected_run_is_compared_with_an_uncorrected_one_of_half_the_rate() -> None:
    half = run("ppo", 1.0, 0.7, "harsh_2_half")
    assert effective_rate(half) == effective_rate(run("s_ppo", 0.5, 0.7)) == pytest.approx(3e-4)
    assert effective_rate(run("st_ppo_on_gradient", 0.5, 0.3)) == 6e-4, "Adam cancels a scale on the gradient"


def test_only_runs_whose_steps_differ_in_size_alone_are_compared() -> None:
    others = [
        run("ppo", 1, 0, "gentle"),
        run("ppo", 1, 0, "harsh_2_once"),
        run("st_ppo_floor_0", 1.4, 0),
        run("st_ppo_paper_on_step", 100, 0),
    ]
    rates, final = compared(LINE + others)
    assert (rates - rates[2]).tolist() == [2, 1, 0] and final.tolist() == [0.4, 0.6, 0.8]
    assert correlation(LINE + others) == pytest.approx(-1)
    assert isnan(correlation(LINE[:2])) and isnan(correlation([LINE[0]] * 3))


def test_every_algorithm_of_the_first_round_but_the_probes_has_a_level_and_a_kind() -> None:
    names = [name for group in levels().values() for name in group]
    assert "s_ppo_sum" in levels()["a ratio per token, critic"] and "s_ppo_probe" not in names
    assert levels()["groups, no critic"] == ["grpo", "so_grpo", "so_grpo_sum"]
    assert kind("ppo") == "no correction" and kind("s_ppo") == "default correction"
    assert kind("s_ppo_sum") == kind("st_ppo_strength_3") == "other strength, unit or estimator"
    assert kind("st_ppo_paper") == kind("st_ppo_floor_0") == "no floor, or scale on the gradient"


def test_the_table_and_the_figure_show_the_line(tmp_path: Path) -> None:
    assert rate_table(LINE)[2:] == ["| a ratio per token, critic | 3 | -1.00 | -0.20 | 1 |  |"]
    assert rate_table(LINE[:1]) == []
    draw_effective_rate(LINE, [], tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 0


def test_a_gradient_is_applied_by_all_later_steps() -> None:
    """Half of a gradient is applied at its own step, a quarter at the next one, an eighth at the third."""
    assert applied_shares(np.array([0.0, 1.0, 1.0]), beta1=0.5).tolist() == [0.375, 0.75, 0.5]
    shares = applied_shares(np.array([0.0] + [1.0] * 400))
    assert shares[:2] == pytest.approx([0.9, 1.0]), "a scale of 0 takes a tenth from its own gradient"


def test_a_scale_that_alternates_between_0_and_1_hardly_weighs_gradients() -> None:
    """Every second step clips and has scale 0. Its gradient is applied by 0.9 / 1.9 of the weights of Adam's
    moment, that of the others by 1 / 1.9."""
    rows = [
        {
            "setting": "harsh_2",
            "algorithm": "s_ppo_probe",
            "seed": 0,
            "iteration": 1 + i // 8,
            "step": 1 + i % 8,
            "actor/clip_fraction": 0.1 if i % 2 else 0.0,
            "actor/correction_scale": 0.0 if i % 2 else 1.0,
            "actor/gradient_norm": float(1 + i % 4),  # of the steps that clip: 2, 4
            "actor/clipping_bias_gradient": 4.0 / (1 + i % 4),  # 2, 1: the absolute norm is 4
        }
        for i in range(400 + FOLLOWING)
    ]
    # a step that was skipped changes nothing, because Adam did not move
    metrics = {name: None for name in rows[0] if name.startswith("actor/")}
    rows.append(rows[200] | metrics | {"step": 0})
    cells = gradient_table(rows)[2].split(" | ")
    assert cells[1:7] == ["`s_ppo_probe`", "0.00", "1.00", "0.47", "0.53", "-1.00"]
    assert cells[7:] == ["", "0.000", "0.000 |"], "the absolute norm does not vary"
