from __future__ import annotations

import math
from typing import Any

import torch

from megatron_stppo.algorithm.selection import leaving
from megatron_stppo.config import AlgorithmConfig


def leaves(
    preset: str, ratios: list[float], advantages: list[float], *ends: int, **settings: Any
) -> list[bool]:
    """Return which tokens leave. Their old probability is 1/8. `ends`: where the turns end."""
    a = AlgorithmConfig.model_validate({"preset": preset, **settings})
    old_T = torch.full((len(ratios),), -math.log(8.0), dtype=torch.float64)
    new_T = old_T + torch.tensor(ratios, dtype=torch.float64).log()
    segments = torch.tensor([0, *ends]) if a.segments == "turn" else None
    return leaving(a, new_T, old_T, torch.tensor(advantages), segments).tolist()


def test_sao_masks_a_token_outside_the_bounds_whatever_its_advantage() -> None:
    """Bounds 0.2 and 4. A ratio on a bound is outside."""
    for sign in (1.0, -1.0):
        found = leaves("sao", [0.19, 0.21, 1.0, 3.9, 4.1], [sign] * 5, 5)
        assert found == [True, False, False, False, True]
    assert (
        leaves("sao", [1.0], [1.0], 1, clip_high=0.0)
        == leaves("sao", [1.0], [1.0], 1, clip_low=0.0)
        == [True]
    )
    assert leaves("sao", [math.nan], [1.0], 1) == [False], "such a step is skipped"


def test_the_turn_form_of_sao_masks_turns_by_bounds_that_follow_their_length() -> None:
    """Turns of 2 and 4 tokens, whose exponents are 2^-0.5 = 0.71 and 4^-0.5 = 0.5, with ratios below 4^0.71 =
    2.67 and above 4^0.5 = 2, then above 0.2^0.71 = 0.32 and below 0.2^0.5 = 0.45."""
    high, turns = [4.8, 1.0, 2.1, 2.1, 2.1, 2.1], {"segments": "turn"}
    assert leaves("sao", high, [1.0] * 6, 2, 6, **turns) == [False] * 2 + [True] * 4
    assert leaves("sao", [0.15, 1.0, *[0.4] * 4], [1.0] * 6, 2, 6, **turns) == [False] * 2 + [True] * 4
    assert leaves("sao", high, [1.0] * 6, 2, 6, **turns, clip_length_power=0) == [False] * 6


def test_dppo_masks_a_token_by_the_change_of_its_probability_in_the_direction_of_its_advantage() -> None:
    """Old probability 1/8, bound 0.15: it may rise to 0.275, or fall by all it has."""
    assert leaves("dppo", [2.19, 2.21, 2.21, 0.01], [1.0, 1.0, -1.0, -1.0], 4) == [False, True, False, False]
    assert leaves("dppo", [0.5, 0.1, 0.1], [-1.0, -1.0, 1.0], 3, select_bound=0.1) == [False, True, False]
    assert leaves("dppo", [0.1], [0.0], 1, select_bound=0.1) == [True], "an advantage of 0 counts as negative"


def test_all_tokens_stay_by_default() -> None:
    assert leaves("st_ppo", [9.0, 0.1], [1.0, -1.0], 2) == [False, False]
