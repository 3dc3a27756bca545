"""What Adam applies of a gradient over several steps. All gradients are 1 or -1."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.training.update import layouts, moves

ONES = [(1, 1), (1, 1), (1, 1)]
CASES = {
    "keep": [*ONES, (-1, 1)],
    "up": [(1, 1), (1, 0.1), (1, 1)],
    "down": [(1, 1), (-1, 0.1), (1, 1)],
}
WARMUP = [1 / 8, 2 / 8, 3 / 8, 4 / 8]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "distributed"])
def moved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Return {case: the distance of each step / its rate after warm-up}."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    layouts.write_model(folder, num_hidden_layers=1)
    (found,) = run_ranks(moves.moves, 1, str(folder), request.param, CASES)
    return {name: [x / w for x, w in zip(far, WARMUP, strict=False)] for name, far in found.items()}


def test_a_gradient_against_the_last_ones_is_not_followed_at_once(moved: dict[str, list[float]]) -> None:
    """After three gradients of 1, m = 1 - 0.9^3 = 0.271 and v = 1 - 0.95^3 = 0.142625. After a fourth of -1,
    m = 0.9 * 0.271 - 0.1 = 0.1439 and v = 0.95 * 0.142625 + 0.05 = 0.18549375."""
    m, v = 0.1439, 0.18549375
    assert moved["keep"] == pytest.approx([1, 1, 1, m / (1 - 0.9**4) / (v / (1 - 0.95**4)) ** 0.5], rel=1e-3)
    assert moved["keep"][3] == pytest.approx(0.418, abs=1e-3), "still in the direction of the old gradients"


def test_later_steps_apply_a_gradient_whose_own_step_was_scaled_down(moved: dict[str, list[float]]) -> None:
    """Scales 1, 0.1 and 1, as with `correction_apply: step`. Adam's direction after gradients a, b, c is
    (0.09 a + 0.1 b) / 0.19 at the second step and (0.081 a + 0.09 b + 0.1 c) / 0.271 at the third."""
    rates = WARMUP[:3]
    up, down = (sum(x * w for x, w in zip(moved[name], rates, strict=True)) for name in ("up", "down"))
    own, later = 0.1 / 0.19, 0.09 / 0.271
    applied = (up - down) / 2  # of the second gradient, in its own step and in the third
    assert applied == pytest.approx(rates[1] * 0.1 * own + rates[2] * later, rel=1e-3)
    nominal = 0.1 * (rates[1] * own + rates[2] * later)  # if a scale of 0.1 weighed the gradient itself
    whole = 10 * nominal  # without a correction
    assert applied / whole == pytest.approx(0.54, abs=0.01)
    assert applied > 5 * nominal
