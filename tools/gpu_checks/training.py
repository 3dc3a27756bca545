"""Train a small model with megatron's local layers, without an engine."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import OptimizerConfig
from megatron_stppo.data.demonstrations import Demonstration
from megatron_stppo.data.packing import groups_of, to_batch
from megatron_stppo.evidence.bench.trial import random_batch
from megatron_stppo.evidence.layouts.cases import cases
from megatron_stppo.evidence.layouts.comparison import TOLERANCES, Measured, compare_case, measure
from megatron_stppo.model import build
from megatron_stppo.model.attention import PackedAttention, Pieces
from megatron_stppo.model.experts import products
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import packer_of
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.training.advantage import estimate
from megatron_stppo.training.cold_start import train_step
from megatron_stppo.training.stages import divided, score, update
from megatron_stppo.weights.sharding.hf_names import read_shape
from tools.gpu_checks.model import DEVICE, EXPERTS, SMALL, configuration, learner_of, once, trajectories, work
from tools.measuring import timed

GPU = DEVICE == "cuda"
BFLOAT16 = {"dtype": "bfloat16"}
LENGTHS = (37, 512, 128, 300, 5, 1000)  # tokens of each sequence, for attention


def attention() -> dict[str, Any]:
    """Compare packed attention in bfloat16 with scaled_dot_product_attention in float32, per sequence."""

    size = 64
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), heads, size, device=DEVICE) for heads in (8, 2, 2))
    for x in (query, key, value):
        x.requires_grad_()
    cotangent = torch.randn(sum(LENGTHS), 8, size, device=DEVICE)
    settings: Any = SimpleNamespace(kv_channels=size)
    layer = PackedAttention(settings, 1, None, "self")
    lengths, mesh = torch.tensor(LENGTHS), SimpleNamespace(context_rank=0, context_size=1, context_group=None)
    pieces = Pieces.of(lengths, torch.device(DEVICE), mesh)  # type: ignore[arg-type]
    half = [x.detach().bfloat16().requires_grad_() for x in (query, key, value)]
    attend = layer._attend_cuda if GPU else layer._attend_each
    packed = attend(*half, pieces)
    exact = []
    for q, k, v in zip(*(x.split(list(LENGTHS)) for x in (query, key, value)), strict=True):
        one = (x.transpose(0, 1)[None] for x in (q, k, v))
        exact.append(scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    whole = torch.cat(exact)
    gradients = torch.autograd.grad(packed, half, cotangent.bfloat16())
    expected = torch.autograd.grad(whole, (query, key, value), cotangent)
    pairs = zip((packed, *gradients), (whole, *expected), strict=True)
    apart = {
        name: float((a.detach().float() - b.detach()).norm() / b.detach().norm())
        for name, (a, b) in zip(("out", "of query", "of key", "of value"), pairs, strict=True)
    }
    if not max(apart.values()) < 0.02:  # bfloat16 rounds by up to 0.004; NaN fails too
        raise AssertionError(f"packed attention differs from the definition: {apart}")
    return {f"relative difference {name}": value for name, value in apart.items()}


def measured(dtype: str, own: Any = None) -> Any:
    """Return the result of a step of actor and critic, as check-layouts computes it."""
    config = configuration(once("small"), model={"dtype": dtype})
    process.start(config)
    shape = read_shape(config.model.path)
    case = cases(shape, 1, config.parallel, [256])[0]
    return case.name(1), measure(case, config, shape, random_batch(shape.vocab, 1, 0), own)


def reference() -> dict[str, Any]:
    """Compute a step in float32 on the CPU, for `step`."""
    _, found = measured("float32")
    tensors = {f"before {name}": x for name, x in found.before.items()} | {"logprob_T": found.logprob_T}
    tensors |= {f"after {name}": x for name, x in found.after.items()}
    save_file({name: x.contiguous() for name, x in tensors.items()}, work() / "reference.safetensors")
    (work() / "reference.json").write_text(json.dumps(found.numbers), encoding="utf-8")
    return {"log-probs": len(found.logprob_T), "gradient norm": found.numbers["actor/gradient_norm"]}


def step() -> dict[str, Any]:
    """Compute the step of `reference` in bfloat16, on the GPU if there is one, and compare."""

    tensors = load_file(work() / "reference.safetensors")
    before, after = (
        {name.removeprefix(when): x for name, x in tensors.items() if name.startswith(when)}
        for when in ("before ", "after ")
    )
    numbers = json.loads((work() / "reference.json").read_text(encoding="utf-8"))
    expected = Measured(numbers, tensors["logprob_T"], before, after)
    case, found = measured("bfloat16", expected.logprob_T)
    row = compare_case(case, found, expected, TOLERANCES[torch.bfloat16])
    if row.broken:
        raise AssertionError(f"differs from float32 on the CPU: {row.broken}; differences {row.apart}")
    return {f"difference of {name}": value for name, value in row.apart.items()}


def first_ratio() -> dict[str, Any]:
    """Score, estimate advantages and update once: every ratio of the first step must be exactly 1."""
    return _first_step(once("small"), "off")


def experts_again() -> dict[str, Any]:
    """Do the same with experts, which each pass chooses again."""
    return _first_step(once("experts", EXPERTS), "off")


def experts_replayed() -> dict[str, Any]:
    """Do the same with experts that the update replays."""
    return _first_step(once("experts", EXPERTS), "old_policy")


def _first_step(model: Path, replay: str) -> dict[str, Any]:
    sections = {"update": {"old_logprob": "score"}, "algorithm": {"routing_replay": replay}}
    config = configuration(model, model=BFLOAT16, **sections)
    learner = learner_of(config)
    played = trajectories(learner.shape.vocab, [60 + 40 * (n % 9) for n in range(32)])
    first, batch = (score(learner, divided(learner, to_batch(played), 0)) for _ in range(2))
    apart = float((first.old_logprob_T - batch.old_logprob_T).abs().max())
    batch = estimate(batch, config.algorithm, groups_of([t.summary for t in played]))
    row = update(learner, batch, 0)[0]
    ratios = {name: row[f"actor/ratio_{name}"] for name in ("p1", "p50", "p99", "max")}
    if set(ratios.values()) != {1.0} or row["actor/first_kl_to_old"] != 0 or apart != 0:
        raise AssertionError(f"passes differ: {ratios}; two of scoring by {apart} nats")
    return ratios | {"gradient norm": row["actor/gradient_norm"], "clip fraction": row["actor/clip_fraction"]}


def grouped() -> dict[str, Any]:
    """Compare experts in one product with experts one after the other: outputs and gradients, in bfloat16.

    Then measure the error of fused gradients, and the rate of experts.
    """

    from tests.model.test_grouped_experts import compared  # needs pytest

    mesh = process.start(configuration(once("experts", EXPERTS), model=BFLOAT16))
    one, separate = compared(mesh, [0, 37, 0, 5, 130, 1, 0], torch.bfloat16, device=DEVICE)
    apart = {
        name: float((one[name] - x).float().norm() / (x.float().norm() + 1e-9))
        for name, x in separate.items()
    }
    if one.keys() != separate.keys() or not max(apart.values()) < 0.01:  # NaN fails too
        raise AssertionError(f"experts in one product differ from separate ones: {apart}")
    found = {"relative difference, output": apart["out"], "largest": max(apart.values())}
    return found | _fused_gradients(mesh) | _rates_of_experts()


def _fused_gradients(mesh: Any) -> dict[str, float]:
    """Compare main gradients in bfloat16 with float64: added without being rounded, and rounded first."""

    from tests.model.test_grouped_experts import accumulated_in
    from tests.model.test_weight_gradient import errors_in

    layers, experts = {}, {}
    with torch.device(DEVICE):
        for name, fused in (("fused", True), ("rounded", False)):
            layers[name] = max(errors_in(mesh, {}, "bfloat16", fused).values())
            run = accumulated_in(mesh, torch.bfloat16, True, fused)
            apart = [
                float((run["mains"][key] - x).norm() / x.norm()) for key, x in run["exact"].items() if x.any()
            ]
            experts[name] = max(apart)
            if run["moved"]["stacked"]:
                raise AssertionError(f"weights of experts were copied together: {run['moved']}")
    found = {f"relative error of layers, {name}": error for name, error in layers.items()}
    found |= {f"relative error of experts, {name}": error for name, error in experts.items()}
    if not layers["fused"] < 1e-5 < layers["rounded"] or not experts["fused"] < experts["rounded"]:
        raise AssertionError(f"fused gradients are not more exact: {found}")
    return found


def _rates_of_experts() -> dict[str, float]:
    """Time a layer's first product, forward and backward, with the experts of Qwen3-30B-A3B (on a CPU small
    ones). The weights' gradients are added expert by expert, or as one product that is rounded first."""

    experts, out, inside = (128, 1536, 2048) if GPU else (8, 48, 64)
    found: dict[str, float] = {}
    with torch.device(DEVICE):
        # leaves in one storage
        weights = [one.detach().requires_grad_() for one in torch.randn(experts, out, inside).bfloat16()]
        for weight, main in zip(weights, torch.zeros(experts, out, inside), strict=True):
            weight.main_grad = main
        for each in (128, 512, 1024) if GPU else (16,):  # rows of an expert
            rows = torch.randn(experts * each, inside).bfloat16().requires_grad_()
            ends = torch.arange(1, experts + 1, dtype=torch.int32) * each
            given = torch.randn(experts * each, out).bfloat16()
            for name, counts in (("expert by expert", [each] * experts), ("one product", None)):
                for _ in range(2):  # the first is the warm-up
                    with timed(found, key := f"{each} rows, {name} (TFLOP/s)"):
                        for _ in range(5):
                            products(rows, ends, weights, counts).backward(given)
                found[key] = 5 * 6 * rows.shape[0] * out * inside / found[key] / 1e12
    return found


def cold_start() -> dict[str, Any]:
    """Train on the same random scripts for some steps: the loss must fall below half."""

    config = configuration(once("small"), model=BFLOAT16)
    mesh, shape = process.start(config), read_shape(config.model.path)
    weights = build.from_hf("actor", shape, config, mesh, process.dtype(config))
    parallel = build.data_parallel(weights, distributed_optimizer=True)
    steps, scripts = (200, 64) if GPU else (40, 8)
    trainer = Trainer(parallel, OptimizerConfig(lr=3e-3), steps)
    head = PolicyHead.of(parallel, mesh, shape.vocab, float32_logits=True)
    ids = [t.token_ids for t in trajectories(SMALL["vocab"], [64] * scripts)]
    taught = [Demonstration(one, (True,) * len(one)) for one in ids]
    losses, start = [], time.perf_counter()
    packer = packer_of(config, shape, mesh)
    for _ in range(steps):
        losses.append(train_step(trainer, head, taught, 1.0, mesh, packer, 1.0)[0])
    seconds = time.perf_counter() - start
    if not losses[-1] < losses[0] / 2 or not math.isfinite(losses[-1]):
        raise AssertionError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} nats per token")
    rate = steps * scripts * 64 / seconds
    return {"loss before": losses[0], "loss after": losses[-1], "tokens per second": rate}
