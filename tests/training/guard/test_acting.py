from __future__ import annotations

from typing import Any

import pytest

from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.training.guard.acting import Acting

IDLE = {
    "actor/acted_share": 0.0,
    "actor/held": 0.0,
    "actor/clip_fraction": 0.0,
    "actor/correction_scale": 1.0,
    "actor/rate_scale": 1.0,
    "actor/lr": 1e-5,
}
CLIPPED = IDLE | {"actor/acted_share": 0.5, "actor/clip_fraction": 0.01}


def warnings(acting: Acting, *rows: dict[str, Any]) -> list[str | None]:
    return [acting.look(row)[1] for row in rows]


def test_the_share_is_of_the_last_ten_iterations_with_an_applied_step() -> None:
    acting = Acting(AlgorithmConfig(preset="st_ppo"), 1e-5)
    rows = [CLIPPED] * 2 + [IDLE | {"actor/held": 1.0}] + [IDLE] * 9
    shares = [acting.look(row)[0].get("actor/acted_share") for row in rows]
    assert shares[:3] == [0.5, 0.5, None]
    assert shares[3] == pytest.approx(1 / 3) and shares[-1] == pytest.approx(0.05)


def test_mechanisms_that_change_nothing_in_ten_iterations_are_named_once() -> None:
    found = warnings(Acting(AlgorithmConfig(preset="st_ppo"), 1e-5), *[IDLE] * 25)
    assert [n for n, text in enumerate(found) if text] == [9]
    assert found[9] == (
        "clipping and the correction changed no step of the last 10 iterations; raise update.actor.lr or "
        "update.minibatches, or lower algorithm.clip_low and algorithm.clip_high"
    )


def test_a_correction_that_clipping_does_not_wake_is_named_alone() -> None:
    found = warnings(Acting(AlgorithmConfig(preset="st_ppo"), 1e-5), *[CLIPPED] * 10)
    assert found[:9] == [None] * 9 and str(found[9]).startswith("the correction changed no step of the last")


def test_the_controller_is_named_by_its_own_field() -> None:
    found = warnings(Acting(AlgorithmConfig(preset="kl"), 1e-5), *[CLIPPED] * 10)
    assert found[9] == (
        "the controller changed no step of the last 10 iterations; raise update.actor.lr, or lower "
        "algorithm.rate_kl"
    )


@pytest.mark.parametrize(
    ("preset", "rows"),
    [
        ("st_ppo", [IDLE | {"actor/lr": 1e-6}] * 30),  # the warm-up
        ("turn_ppo", [CLIPPED] * 30),
        ("st_ppo", [CLIPPED | {"actor/correction_scale": 0.5}] + [IDLE] * 30),  # it has acted
        ("st_ppo", [{"actor/skipped": 1.0}] * 30),  # a refused update has no other columns
    ],
)
def test_nothing_is_said_where_nothing_is_wrong_or_known(preset: str, rows: list[dict[str, Any]]) -> None:
    assert not any(warnings(Acting(AlgorithmConfig(preset=preset), 1e-5), *rows))


def test_a_resumed_run_counts_on() -> None:
    algorithm = AlgorithmConfig(preset="st_ppo")
    first, second = Acting(algorithm, 1e-5), Acting(algorithm, 1e-5)
    warnings(first, CLIPPED, *[IDLE] * 8)
    second.restore(first.state())
    assert second.look(IDLE) == (
        {"actor/acted_share": 0.05},
        "the correction changed no step of the last 10 "
        "iterations; it can only act where tokens are clipped, and where algorithm.correction_floor lets it",
    )
