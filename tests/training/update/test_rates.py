from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_stppo.algorithm.rate import RATES, RateInput, StepMemory
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.training.update import actor_step
from tests.ranks import run_ranks
from tests.training.update import layouts, rates


def test_steps_that_change_nothing_leave_no_memory_and_a_resumption_is_bitwise(tmp_path: Path) -> None:
    """Three of the first iteration's four steps measure a KL divergence above twice the target."""
    layouts.write_model(tmp_path / "hf", num_hidden_layers=1)
    algorithm = {"preset": "s_ppo", "rate": "kl", "rate_kl": 1e-3}
    ((rows, memories),) = run_ranks(rates.resumed, 1, str(tmp_path / "hf"), str(tmp_path), algorithm)
    first, skipped, held, last, again = rows
    scales = [memory.rate_scale for memory in memories]
    assert scales[0] == pytest.approx(1.5**-3), rows[0]
    assert scales[0] == scales[1] == scales[2] > scales[3] == scales[4]
    assert last == again
    assert 0 < first["actor/correction_scale"] < 1
    assert (skipped["actor/skipped"], skipped["actor/effective_lr"], skipped["actor/kl_after"]) == (1, 0, 0)
    assert memories[0].kl_after == memories[2].kl_after == first["actor/kl_after"] > 0
    assert "actor/effective_share" in first
    for without in (skipped, held):
        assert not {"actor/effective_share", "actor/removed_share"} & without.keys()
    usual = [(memory.deviation, memory.whitened) for memory in memories]
    assert usual == [(0.1, 1)] * 3 + [(pytest.approx((0.1 + 3.1) / 2), 2)] * 2
    assert skipped["actor/rate_scale"] == pytest.approx(scales[0]), "the factor of the last step"
    assert (held["actor/held"], held["actor/effective_lr"]) == (1, 0)
    assert 0 < first["actor/effective_lr"] < 5e-3 * first["actor/rate_scale"]


@pytest.mark.parametrize(("rise", "rises"), [("step", [True] * 4), ("iteration", [False] * 3 + [True])])
def test_the_steps_that_may_raise_the_factor_are_those_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, rise: str, rises: list[bool]
) -> None:
    given: list[RateInput] = []
    monkeypatch.setitem(RATES, "kl", lambda one: given.append(one) or 1.0)  # type: ignore[func-returns-value]
    algorithm = AlgorithmConfig.model_validate({"preset": "kl", "rate_rise": rise})
    one_T = torch.zeros(1)
    batch = SimpleNamespace(old_logprob_T=one_T - 0.1)
    loss: Any = SimpleNamespace(algorithm=algorithm, batch=batch)
    ratios: Any = SimpleNamespace(logprob_T=one_T, live_T=torch.ones(1, dtype=torch.bool))
    actor: Any = SimpleNamespace(memory=StepMemory())
    for index in range(4):
        actor_step.rate_scale(actor, loss, ratios, index, 4)
    assert [one.rises for one in given] == rises
