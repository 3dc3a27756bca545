from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.update import layouts, rates


def test_the_rates_state_skips_steps_that_change_nothing_and_is_resumed_bitwise(tmp_path: Path) -> None:
    """Three of the first iteration's four steps measure a KL divergence above twice the target."""
    layouts.write_model(tmp_path / "hf", num_hidden_layers=1)
    algorithm = {"preset": "kl", "rate_kl": 1e-3}
    ((rows, memories),) = run_ranks(rates.resumed, 1, str(tmp_path / "hf"), str(tmp_path), algorithm)
    first, skipped, held, last, again = rows
    scales = [memory.rate_scale for memory in memories]
    assert scales[0] == pytest.approx(1.5**-3), rows[0]
    assert scales[0] == scales[1] == scales[2] > scales[3] == scales[4]
    assert last == again
    assert (skipped["actor/skipped"], skipped["actor/effective_lr"]) == (1, 0)
    assert (held["actor/held"], held["actor/effective_lr"]) == (1, 0)
    assert first["actor/effective_lr"] == pytest.approx(5e-3 * first["actor/rate_scale"])
