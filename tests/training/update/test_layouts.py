"""The same step under every layout and microbatch size, compared with a float64 reference in one process."""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.training.advantage import with_observations
from tests.ranks import run_ranks
from tests.training.update import layouts

ST_PPO = {
    "preset": "st_ppo",
    "entropy_coefficient": 0.01,
    "kl_in": "loss",
    "kl_estimator": "k3",
    "kl_coefficient": 0.1,
    "correction": "gradient",
    "correction_unit": "mean",
    "correction_strength": 1,
    "correction_probe": True,
}
# (family, ranks, parallel:, whether optimizer states, and so gradients, are sharded)
CASES: dict[str, tuple[str, int, dict[str, Any], bool]] = {
    "one": ("qwen3", 1, {}, False),
    "tensor": ("qwen3", 2, {"tensor": 2}, False),
    "virtual": ("qwen3", 2, {"pipeline": 2, "virtual": 2}, False),
    "context": ("qwen3", 2, {"context": 2}, False),
    "tensor_sequence_pipeline": ("qwen3", 4, {"tensor": 2, "pipeline": 2, "sequence": True}, False),
    "biases_tensor": ("qwen2", 2, {"tensor": 2}, False),
    "llama_tensor": ("llama", 2, {"tensor": 2}, False),
    "delta_net": ("qwen3_5", 1, {}, False),
    "delta_net_tensor_sequence": ("qwen3_5", 2, {"tensor": 2, "sequence": True}, False),
    "experts_over_all": ("mixtral", 4, {"tensor": 2, "sequence": True, "expert": 2}, False),
    "sinks": ("gpt_oss", 1, {}, False),
}
MORE: dict[str, tuple[str, int, dict[str, Any], bool]] = {
    "virtual_both_ends": (
        "qwen3",
        2,
        {"pipeline": 2, "virtual": 2, "first_stage_layers": 2, "last_stage_layers": 2},
        False,
    ),
    "data": ("qwen3", 2, {}, True),
    "experts_over_data": ("qwen3_moe", 2, {"expert": 2}, False),
    "mixtral_pipeline": ("mixtral", 2, {"pipeline": 2}, False),
    "experts_over_context": ("qwen3_moe", 2, {"expert": 2, "context": 2}, False),
    "experts_tensor_sequence": ("qwen3_moe", 2, {"tensor": 2, "sequence": True}, False),
    "untied_virtual_context": ("qwen2", 4, {"pipeline": 2, "virtual": 2, "context": 2}, False),
    "delta_net_tensor": ("qwen3_5", 2, {"tensor": 2}, False),
    "delta_net_virtual": ("qwen3_5", 2, {"pipeline": 2, "virtual": 2}, False),
    "delta_net_data": ("qwen3_5", 2, {}, True),
    "uneven_delta_net": ("qwen3_5", 2, {"pipeline": 2, "first_stage_layers": 1}, False),
    "delta_net_experts": ("qwen3_5_moe", 2, {"expert": 2}, False),
    "delta_net_experts_tensor": ("qwen3_5_moe", 2, {"tensor": 2, "sequence": True}, False),
    "joined_delta_net": ("qwen3_next", 2, {"pipeline": 2}, False),
    "sinks_experts_over_all": ("gpt_oss", 4, {"tensor": 2, "sequence": True, "expert": 2}, False),
    "sinks_pipeline_context": ("gpt_oss", 4, {"pipeline": 2, "context": 2}, False),
    "uneven_sinks": ("gpt_oss", 2, {"pipeline": 2, "first_stage_layers": 1}, False),
    "sinks_virtual": ("gpt_oss", 2, {"pipeline": 2, "virtual": 2}, False),
    "uneven": ("llama", 2, {"pipeline": 2, "first_stage_layers": 1}, False),
}
# recomputation of activations, which must not change any result
RECOMPUTE = {"virtual": "full", "context": "selective", "experts_over_context": "full"}
RECOMPUTE |= {"sinks_pipeline_context": "selective", "sinks_experts_over_all": "full"}
# gradients of the weights are added to the main gradients by one product
FUSED = {"virtual", "context", "tensor_sequence_pipeline", "experts_over_all", "experts_over_data"}
FUSED |= {"sinks_experts_over_all"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for family in layouts.OF_FAMILY:
        layouts.write_model(root / family, family)
    return {family: root / family for family in layouts.OF_FAMILY}


@cache
def reference(folder: Path) -> dict[str, Any]:
    """Return the expected numbers of both steps, and the actor's gradients by the names of a checkpoint."""
    model = in_float64(folder)
    expected = numbers_of(model)
    gradients = _by_name(model, expected.pop("actor gradients"))
    del expected["critic gradients"]
    return expected | {"gradients": gradients}


def in_float64(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


def numbers_of(model: Any) -> dict[str, Any]:
    """Return the expected numbers of both steps, in float64, from transformers and the paper's formulas.

    Only parameters that require a gradient are trained. "actor gradients" and "critic gradients" are
    {parameter: its gradient}.
    """
    given = layouts.batch()
    logprobs, entropies, squares, hidden, after_prompt = [], [], [], [], []
    for n in range(len(given.live_N)):
        start, end = given.sequence_offsets[n : n + 2].tolist()
        ids = given.tokens_P[start:end]
        states = model.model(ids[None]).last_hidden_state[0]
        table = torch.log_softmax(model.lm_head(states), -1)
        first, last = given.action_offsets[n : n + 2].tolist()
        at = given.action_index_T[first:last] - start
        logprobs.append(table[at - 1, ids[at]])
        entropies.append(-(table.exp() * table).sum(-1)[at - 1])
        squares.append(table.detach().exp().square().sum(-1)[at - 1])
        hidden.append(states[at - 1])
        after_prompt.append(states[int(at[0]) - 1 : -1])  # the states that predict turns and observations
    actor = _actor(model, given, *map(torch.cat, (logprobs, entropies, squares)))
    actor |= {"actor gradients": _gradients(model)}
    model.zero_grad()
    critic = _critic(model, given, torch.cat(hidden))
    critic |= {"critic gradients": _gradients(model)}
    model.zero_grad()
    observing = _critic(model, with_observations(given), torch.cat(after_prompt))
    value_R = torch.cat(after_prompt).detach() @ layouts.value_head(hidden[0].shape[1]).squeeze(0)
    return actor | critic | {f"observing {k}": v for k, v in observing.items()} | {"value_R": value_R}


def _actor(
    model: Any, given: Any, logprob_T: torch.Tensor, entropy_T: torch.Tensor, sum_p_sq_T: torch.Tensor
) -> dict[str, Any]:
    old_T = logprob_T.detach() + given.old_logprob_T.double()
    live_T, turns = given.live_T, given.turn_offsets.tolist()
    count = int(live_T.sum())
    objective, clipped = torch.zeros((), dtype=torch.float64), 0
    sizes = {"coefficient": [0.0, 0.0], "logit": [0.0, 0.0]}  # squared estimates of ||C|| and of ||grad J||
    lost = torch.zeros((), dtype=torch.float64)  # its gradient is the part that clipping removed
    ratios, by_turn = [], {}
    for first, last in itertools.pairwise(turns):
        if not live_T[first]:
            continue
        ratio = torch.exp((logprob_T[first:last] - old_T[first:last]).mean())  # one per turn
        advantage = given.advantage_T[first:last].double()
        narrow = 1 / (last - first) ** AlgorithmConfig().clip_length_power
        low, high = 0.8**narrow, 1.2**narrow
        least = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        dual = 3**narrow * advantage  # the ratio counts as at most this where A < 0
        objective += torch.where(advantage < 0, torch.maximum(least, dual), least).sum() / count
        beyond = (advantage < 0) & (ratio > 3**narrow)
        outside = (advantage > 0) & (ratio > high) | (advantage < 0) & (ratio < low)
        clipped += int(outside.sum())
        ratios.append(ratio.item())
        for name in _turn_names(given, first):
            out, of = by_turn.get(name, (0, 0))
            by_turn[name] = (out + int(outside.sum()), of + last - first)
        lost += (ratio * advantage[outside]).sum() / count
        slope = 1 - 2 * logprob_T[first:last].exp() + sum_p_sq_T[first:last]
        for which, part in enumerate((advantage[outside], advantage[~outside & ~beyond])):
            coefficient = ratio.item() * float(part.sum()) / (last - first) / count  # of every token
            sizes["coefficient"][which] += coefficient**2 * (last - first)
            sizes["logit"][which] += coefficient**2 * float(slope.detach().sum())
    delta = (logprob_T - given.reference_logprob_T.double())[live_T]
    kl = (torch.exp(-delta) - 1 + delta).sum() / count
    entropy = entropy_T[live_T].sum() / count
    parameters = _trained(model)
    bias_norm = norm_of(torch.autograd.grad(lost, parameters, retain_graph=True))
    (-objective + 0.1 * kl - 0.01 * entropy).backward(retain_graph=True)
    gradient_norm = norm_of([p.grad for p in parameters])
    free = {name: math.sqrt(of_c / of_j) * gradient_norm for name, (of_c, of_j) in sizes.items()}
    return {
        "actor/objective": objective.item(),
        "actor/kl_loss": kl.item(),
        "actor/entropy": entropy.item(),
        "actor/gradient_norm": gradient_norm,
        "actor/clip_fraction": clipped / count,
        "actor/clipping_bias": bias_norm,
        "actor/clipping_bias_gradient": bias_norm,
        **{f"actor/clipping_bias_{name}": norm for name, norm in free.items()},
        "actor/correction_scale": 1 / max(1, bias_norm),
        **{f"actor/clip_fraction_turn_{name}": out / of for name, (out, of) in by_turn.items()},
        "actor/ratio_p1": min(ratios),  # of fewer than 100
        "actor/ratio_p50": sorted(ratios)[math.ceil(len(ratios) / 2) - 1],
        "actor/ratio_p99": max(ratios),
        "actor/ratio_max": max(ratios),
        "logprob_T": logprob_T.detach(),
    }


def _turn_names(given: Any, first: int) -> list[str]:
    """Return the names of the turn that starts at action token `first`. Example: ["2", "last"]."""
    starts = given.turn_offsets.tolist()
    owner = given.turn_to_sequence_S.tolist()
    turn = starts.index(first)
    number = turn - owner.index(owner[turn]) + 1
    return [str(number)] + ["last"] * (turn + 1 == len(owner) or owner[turn + 1] != owner[turn])


def _trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _gradients(model: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    return {parameter: parameter.grad for parameter in _trained(model) if parameter.grad is not None}


def _by_name(model: Any, gradients: dict[torch.nn.Parameter, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return gradients by the names of a checkpoint.

    For experts these differ from transformers' parameters.
    """
    other = copy.deepcopy(model)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter, own in zip(other.parameters(), model.parameters(), strict=True):
            parameter.copy_(gradients[own])
        other.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def _critic(model: Any, given: Any, hidden_T: torch.Tensor) -> dict[str, Any]:
    head = layouts.value_head(hidden_T.shape[1]).requires_grad_()
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    value_T = (hidden_T @ head.t()).squeeze(1) + bias
    old_T, return_T = given.value_T.double(), given.return_T.double()
    near_T = old_T + (value_T - old_T).clamp(-0.5, 0.5)
    error_T = torch.maximum((value_T - return_T) ** 2, (near_T - return_T) ** 2) / 2
    loss = error_T[given.live_T].mean()
    loss.backward(retain_graph=True)
    gradients = [p.grad for p in _trained(model.model)] + [head.grad, bias.grad]
    return {"critic/loss": loss.item(), "critic/gradient_norm": norm_of(gradients)}


def norm_of(gradients: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


def test_reference_batch_has_clipped_and_unclipped_tokens(models: dict[str, Path]) -> None:
    for folder in models.values():
        assert 0.1 < reference(folder)["actor/clip_fraction"] < 0.9


@pytest.mark.usefixtures("one_order")
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_step_equals_float64_reference_under_every_layout(
    models: dict[str, Path], tmp_path: Path, case: str
) -> None:
    family, world, parallel, distributed = (CASES | MORE)[case]
    model = models[family]
    small, large = zip(
        *run_ranks(
            *(layouts.steps, world, str(model), parallel, (24, 1000), distributed, ST_PPO, str(tmp_path)),
            RECOMPUTE.get(case, "none"),
            case in FUSED,
        ),
        strict=True,
    )
    for results in (small, large):
        _same_numbers(model, results)
    if not distributed:
        _same_gradients(model, tmp_path / "gradients")
    _same_weights(model, tmp_path / "weights")


def _same_numbers(model: Path, results: tuple[Any, ...]) -> None:
    numbers, own, value_R = results[0]
    expected = reference(model)
    torch.testing.assert_close(torch.tensor(own).double(), expected["logprob_T"], atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(value_R).double(), expected["value_R"], atol=2e-4, rtol=2e-4)
    for name in expected.keys() - {"logprob_T", "gradients", "value_R"}:
        assert numbers[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-6), name
    assert all(other == numbers for other, _, _ in results), "every rank reports the same numbers"


def _same_gradients(model: Path, folder: Path) -> None:
    ours = load_file(folder / "model.safetensors")
    for name, gradient in reference(model)["gradients"].items():
        apart = (ours[name].double() - gradient).norm() / gradient.norm()
        assert apart < 1e-4, (name, float(apart))


FIRST: dict[Path, dict[str, torch.Tensor]] = {}


def _same_weights(model: Path, folder: Path) -> None:
    """Compare the updated weights with those of the layout that ran first."""
    weights, before = (load_file(f / "model.safetensors") for f in (folder, model))
    moved = sum(float((weights[k] - before[k]).abs().sum()) for k in weights)
    assert moved > 0
    first = FIRST.setdefault(model, weights)
    # Adam's first step is lr * sign(g) wherever |g| is well above its epsilon: a difference in a gradient's
    # rounding near zero moves a weight by up to 2 lr, so the bound is on the mean.
    apart = sum(float((weights[k] - first[k]).abs().sum()) for k in weights)
    assert apart < 2e-3 * moved


@pytest.mark.parametrize(("segments", "low", "high"), [("token", 0.3, 0.5), ("turn", 0.5, 1)])
def test_segments_outside_the_bounds_leave_the_surrogate(
    segments: str, low: float, high: float, tmp_path: Path
) -> None:
    """On one rank, and on two that share turns. The others are not clipped."""
    layouts.write_model(tmp_path / "hf", num_hidden_layers=1)
    algorithm = {"preset": "sao", "segments": segments, "entropy_coefficient": 0, "kl_coefficient": 0}
    algorithm |= {"clip_low": low, "clip_high": high}
    given = ((24, 1000), False, algorithm)
    one = run_ranks(layouts.steps, 1, str(tmp_path / "hf"), {}, *given, str(tmp_path / "one"))
    two = run_ranks(layouts.steps, 2, str(tmp_path / "hf"), {"context": 2}, *given, str(tmp_path / "two"))
    numbers = [numbers for results in (*one, *two) for numbers, _, _ in results]
    batch = layouts.batch()
    tokens, kept, objective = int(batch.live_T.sum()), 0, 0.0
    ends = batch.turn_offsets.tolist() if segments == "turn" else range(len(batch.live_T) + 1)
    for first, last in itertools.pairwise(ends):
        ratio = float((-batch.old_logprob_T[first:last].double()).mean().exp())
        length = last - first
        narrow = 1 / length ** AlgorithmConfig().clip_length_power
        if batch.live_T[first] and (1 - low) ** narrow < ratio < (1 + high) ** narrow:
            kept += length
            objective += ratio * float(batch.advantage_T[first:last].double().sum())
    assert 0.2 < kept / tokens < 0.9
    for own in numbers:
        assert own["actor/selected"] == kept / tokens
        assert own["actor/clip_fraction"] == 0
        assert own["actor/objective"] == pytest.approx(objective / tokens, rel=1e-4)
        assert own["actor/gradient_norm"] == pytest.approx(numbers[0]["actor/gradient_norm"], rel=1e-4)
