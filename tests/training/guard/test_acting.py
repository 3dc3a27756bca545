from __future__ import annotations

from typing import Any

import pytest

from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.training.guard.acting import Acting

IDLE = {
    "actor/acted_share": 0.0,
    "actor/held": 0.0,
    "actor/clip_fraction": 0.0,
    "actor/selected": 1.0,
    "actor/correction_scale": 1.0,
    "actor/rate_scale": 1.0,
    "actor/lr": 1e-5,
    "critic/explained_variance": 0.1,
}
CLIPPED = IDLE | {"actor/acted_share": 0.5, "actor/clip_fraction": 0.01}
CORRECTED = CLIPPED | {"actor/correction_scale": 0.5}
SELECTED = IDLE | {"actor/acted_share": 0.5, "actor/selected": 0.9}


def acting(preset: str) -> Acting:
    return Acting(AlgorithmConfig(preset=preset), 1e-5)


def warnings(watching: Acting, *rows: dict[str, Any]) -> dict[int, str]:
    """Return the warnings by the number of the row, from 1."""
    found = {n: watching.look(row)[1] for n, row in enumerate(rows, start=1)}
    assert all(len(texts) <= 1 for texts in found.values())
    return {n: texts[0] for n, texts in found.items() if texts}


def test_the_share_is_of_the_last_ten_iterations_with_an_applied_step() -> None:
    watching = acting("st_ppo")
    rows = [CLIPPED] * 2 + [IDLE | {"actor/held": 1.0}] + [IDLE] * 9
    shares = [watching.look(row)[0].get("actor/acted_share") for row in rows]
    assert shares[:3] == [0.5, 0.5, None]
    assert shares[3] == pytest.approx(1 / 3) and shares[-1] == pytest.approx(0.05)


def test_what_changes_nothing_in_ten_iterations_is_named_once() -> None:
    assert warnings(acting("st_ppo"), *[IDLE] * 25) == {
        10: "clipping changed no step of the last 10 iterations; raise update.actor.lr or "
        "update.minibatches, or lower algorithm.clip_low and algorithm.clip_high"
    }


def test_a_mechanism_that_has_acted_once_is_named_when_it_stops() -> None:
    found = warnings(acting("st_ppo"), CORRECTED, *[IDLE] * 30)
    assert list(found) == [11] and found[11].startswith("clipping changed no step")


@pytest.mark.parametrize(
    ("preset", "row", "text"),
    [
        ("st_ppo", CLIPPED, "the correction changed no step of the last 10 iterations; it acts only where"),
        ("kl", CLIPPED, "the controller algorithm.rate changed no step of the last 10 iterations; raise"),
        ("sao", IDLE, "the selection took nothing out of any step of the last 10 iterations; raise"),
        (
            "turn_ppo",
            CLIPPED | {"critic/explained_variance": -0.1},
            "the critic predicted returns worse than",
        ),
    ],
)
def test_each_is_named_with_what_to_change(preset: str, row: dict[str, Any], text: str) -> None:
    found = warnings(acting(preset), *[row] * 20)
    assert list(found) == [10] and found[10].startswith(text)


@pytest.mark.parametrize(
    ("preset", "rows"),
    [
        ("st_ppo", [IDLE | {"actor/lr": 1e-6}] * 30),  # the warm-up
        ("turn_ppo", [CLIPPED] * 30),
        ("st_ppo", ([CORRECTED] + [IDLE] * 9) * 3),
        ("st_ppo", [{"actor/skipped": 1.0}] * 30),  # a refused update has no other columns
        ("sao", [SELECTED] * 30),
        ("dppo", [SELECTED] * 30),
        ("cispo", [{k: v for k, v in IDLE.items() if k != "actor/acted_share"}] * 30),
        ("grpo", [{k: v for k, v in CLIPPED.items() if not k.startswith("critic")}] * 30),
    ],
)
def test_nothing_is_said_where_nothing_is_wrong_or_known(preset: str, rows: list[dict[str, Any]]) -> None:
    assert not warnings(acting(preset), *rows)


def test_a_rate_that_is_a_mean_of_equal_numbers_counts_as_warm() -> None:
    assert warnings(acting("st_ppo"), *[IDLE | {"actor/lr": 1e-5 * (1 - 1e-15)}] * 10)


def test_a_resumed_run_counts_on_and_says_nothing_twice() -> None:
    first, second, third = acting("st_ppo"), acting("st_ppo"), acting("st_ppo")
    assert not warnings(first, CLIPPED, *[IDLE] * 8)
    second.restore(first.state())
    share, (text,) = second.look(CLIPPED)
    assert share == {"actor/acted_share": pytest.approx(0.1)} and text.startswith("the correction")
    third.restore(second.state())
    assert not warnings(third, *[CLIPPED] * 20)
