from __future__ import annotations

from typing import Any

import pytest

from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.training.guard.guard import Acting

IDLE = {
    "actor/held": 0.0,
    "actor/clip_fraction": 0.0,
    "actor/selected": 1.0,
    "actor/correction_scale": 1.0,
    "actor/rate_scale": 1.0,
    "actor/effective_share": 1.0,
    "actor/lr": 1e-5,
    "critic/explained_variance": 0.1,
}
CLIPPED = IDLE | {"actor/clip_fraction": 0.01}
CORRECTED = CLIPPED | {"actor/correction_scale": 0.5, "actor/effective_share": 0.5}
SELECTED = IDLE | {"actor/selected": 0.9}
FROZEN = CORRECTED | {"actor/correction_scale": 1e-6, "actor/effective_share": 1e-6}


def acting(preset: str) -> Acting:
    return Acting(AlgorithmConfig(preset=preset), 1e-5)


def warnings(watching: Acting, *rows: dict[str, Any]) -> dict[int, str]:
    """Return the warnings by the number of the row, from 1."""
    texts = {n: watching.look(row) for n, row in enumerate(rows, start=1)}
    assert all(len(of_row) <= 1 for of_row in texts.values())
    return {n: of_row[0] for n, of_row in texts.items() if of_row}


@pytest.mark.parametrize(
    ("preset", "row", "text"),
    [
        ("st_ppo", IDLE, "clipping changed no step of the last 10 iterations; nothing is wrong if"),
        ("st_ppo", CLIPPED, "the correction changed no step of the last 10 iterations; it acts only where"),
        ("kl", CLIPPED, "the controller algorithm.rate changed no step of the last 10 iterations"),
        ("sao", IDLE, "the selection took nothing out of any step of the last 10 iterations"),
        (
            "st_ppo",
            FROZEN,
            "the run is nearly frozen: the steps of the last 10 iterations had less than 30 %",
        ),
        ("ppo", CLIPPED | {"critic/explained_variance": 0.04}, "the critic explained less than 5 % of"),
    ],
)
def test_what_is_wrong_in_ten_iterations_is_said_once(preset: str, row: dict[str, Any], text: str) -> None:
    said = warnings(acting(preset), *[row] * 25)
    assert list(said) == [10] and said[10].startswith(text) and "raise update.actor.lr" not in said[10]


def test_a_mechanism_that_has_acted_once_is_named_when_it_stops() -> None:
    said = warnings(acting("st_ppo"), CORRECTED, *[IDLE] * 30)
    assert list(said) == [11] and said[11].startswith("clipping changed no step")


def test_single_iterations_do_not_hide_what_holds_on_average() -> None:
    """Nine of ten at 0.2 of the rate are 0.28; a critic at -0.1 nine times and at 0.9 once explains 0."""
    slow = CORRECTED | {"actor/effective_share": 0.2}
    assert warnings(acting("st_ppo"), *[slow] * 9, CORRECTED | {"actor/effective_share": 1.0})[10]
    values = [CLIPPED | {"critic/explained_variance": share} for share in (*[-0.1] * 9, 0.9)]
    assert warnings(acting("ppo"), *values)[10].startswith("the critic")


@pytest.mark.parametrize(
    ("preset", "rows"),
    [
        ("st_ppo", [IDLE | {"actor/lr": 1e-6}] * 30),  # the warm-up
        ("st_ppo", [FROZEN | {"actor/held": 1.0}] * 30),
        ("turn_ppo", [CLIPPED] * 30),
        ("st_ppo", ([CORRECTED] + [IDLE] * 9) * 3),
        ("st_ppo", [{"actor/skipped": 1.0}] * 30),  # a refused update has no other columns
        ("sao", [SELECTED] * 30),
        ("dppo", [SELECTED] * 30),
        ("cispo", [IDLE] * 30),
        ("turn_ppo", [{k: v for k, v in CLIPPED.items() if not k.startswith("critic")}] * 30),
    ],
)
def test_nothing_is_said_where_nothing_is_wrong_or_known(preset: str, rows: list[dict[str, Any]]) -> None:
    assert not warnings(acting(preset), *rows)


def test_a_rate_that_is_a_mean_of_equal_numbers_counts_as_warm() -> None:
    assert warnings(acting("st_ppo"), *[IDLE | {"actor/lr": 1e-5 * (1 - 1e-15)}] * 10)


def test_a_resumed_run_counts_on_and_says_nothing_twice() -> None:
    first, second, third = acting("st_ppo"), acting("st_ppo"), acting("st_ppo")
    assert not warnings(first, CLIPPED, *[CLIPPED] * 8)
    second.restore(first.state())
    (text,) = second.look(CLIPPED)
    assert text.startswith("the correction")
    third.restore(second.state())
    assert not warnings(third, *[CLIPPED] * 20)
