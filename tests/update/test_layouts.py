"""The same step under every layout and microbatch size, against a plain float64 reference in one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.update import layouts

ST_PPO = {
    "preset": "st_ppo",
    "entropy_coefficient": 0.01,
    "kl_in": "loss",
    "kl_estimator": "k3",
    "kl_coefficient": 0.1,
    "correction": "gradient",
    "correction_unit": "mean",
}
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    layouts.write_model(folder)
    return folder


@cache
def reference(folder: Path) -> dict[str, Any]:
    """Loss, gradient norm and log-probs of the actor step in float64: transformers and the formulas of the
    paper."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder).double()
    given = layouts.batch()
    logprobs, entropies = [], []
    for n in range(len(given.live_N)):
        start, end = given.sequence_offsets[n : n + 2].tolist()
        ids = given.tokens_P[start:end]
        table = torch.log_softmax(model(ids[None]).logits[0], -1)
        first, last = given.action_offsets[n : n + 2].tolist()
        at = given.action_index_T[first:last] - start
        logprobs.append(table[at - 1, ids[at]])
        entropies.append(-(table.exp() * table).sum(-1)[at - 1])
    logprob_T, entropy_T = torch.cat(logprobs), torch.cat(entropies)
    old_T = logprob_T.detach() + given.old_logprob_T.double()
    live_T, turns = given.live_T, given.turn_offsets.tolist()
    count = int(live_T.sum())
    objective, clipped = torch.zeros((), dtype=torch.float64), 0
    lost = torch.zeros((), dtype=torch.float64)  # its gradient is what clipping removed
    for first, last in itertools.pairwise(turns):
        if not live_T[first]:
            continue
        ratio = torch.exp((logprob_T[first:last] - old_T[first:last]).mean())  # one per turn
        advantage = given.advantage_T[first:last].double()
        objective = (
            objective + torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / count
        )
        outside = (advantage > 0) & (ratio > 1.2) | (advantage < 0) & (ratio < 0.8)
        clipped += int(outside.sum())
        lost = lost + (ratio * advantage[outside]).sum() / count
    delta = (logprob_T - given.reference_logprob_T.double())[live_T]
    kl = (torch.exp(-delta) - 1 + delta).sum() / count
    entropy = entropy_T[live_T].sum() / count
    bias_norm = norm_of(torch.autograd.grad(lost, list(model.parameters()), retain_graph=True))
    (-objective + 0.1 * kl - 0.01 * entropy).backward()
    norm = norm_of([p.grad for p in model.parameters()])
    return {
        "actor/objective": float(objective),
        "actor/kl_loss": float(kl),
        "actor/entropy": float(entropy),
        "actor/gradient_norm": norm,
        "actor/clip_fraction": clipped / count,
        "actor/clipping_bias": bias_norm,
        "logprob_T": logprob_T.detach(),
    }


def norm_of(gradients: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


def test_reference_batch_has_clipped_and_unclipped_tokens(model: Path) -> None:
    assert 0.1 < reference(model)["actor/clip_fraction"] < 0.9


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_equals_float64_reference_under_every_layout(
    model: Path, tmp_path: Path, layout: tuple[int, int, int]
) -> None:
    out = tmp_path / "updated"
    world = math.prod(layout)
    sequence = layout == (2, 2, 1)  # one of them under sequence parallelism too
    small, large = zip(
        *run_ranks(layouts.steps, world, str(model), layout, (24, 1000), sequence, ST_PPO, str(out)),
        strict=True,
    )
    for results in (small, large):
        _same_as_reference(model, results)
    _same_as_first_layout(model, out, small[0][1])


def _same_as_reference(model: Path, results: tuple[Any, ...]) -> None:
    numbers, critic, own = results[0]
    expected = reference(model)
    torch.testing.assert_close(torch.tensor(own).double(), expected["logprob_T"], atol=2e-5, rtol=0)
    for name, value in expected.items():
        if name != "logprob_T":
            assert numbers[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
    assert all(r[0] == numbers and r[1] == critic for r in results), "every rank reports the same numbers"


FIRST: dict[str, Any] = {}


def _same_as_first_layout(model: Path, out: Path, critic: dict[str, float]) -> None:
    """Updated weights and the critic's numbers, against those of the layout that ran first."""
    weights = load_file(out / "model.safetensors")
    before = load_file(model / "model.safetensors")
    moved = sum(float((weights[k] - before[k]).abs().sum()) for k in weights)
    assert moved > 0
    if not FIRST:
        FIRST.update(weights=weights, critic=critic)
        return
    for name, value in critic.items():
        assert value == pytest.approx(FIRST["critic"][name], rel=1e-4), name
    # Adam's first step is lr * sign(g) wherever |g| is well above its epsilon: a difference in a gradient's
    # rounding near zero moves a weight by up to 2 lr, so the bound is on the mean.
    apart = sum(float((weights[k] - FIRST["weights"][k]).abs().sum()) for k in weights)
    assert apart < 2e-3 * moved
