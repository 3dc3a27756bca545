"""Functions that run on a rank: log-probs and gradients in float64, with common prefixes shared and not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_stppo.cluster.launch import process


def observe(model: str, parallel: dict[str, Any], budget: int) -> dict[str, Any]:
    """Return the largest differences of log-probs and of gradients, relative to the largest gradient of the
    parameter, and the tokens of the micro-batches."""
    process.prepare(engine=False)
    import torch
    import torch.distributed as dist
    from megatron.core import tensor_parallel

    from megatron_stppo.config import Config
    from megatron_stppo.model import build
    from megatron_stppo.model.pipeline import forward_backward, packer_of
    from megatron_stppo.parallel import groups
    from megatron_stppo.weights.sharding.hf_names import read_shape
    from tests.training.update.layouts import batch

    torch.set_num_threads(1)
    config = Config.model_validate({"model": {"path": model}, "parallel": parallel})
    mesh, shape, given = groups.initialize(config.parallel), read_shape(Path(model)), batch()
    policy = build.from_hf("actor", shape, config, mesh, torch.float64)
    policy = [chunk.requires_grad_() for chunk in policy]
    packer = packer_of(config, shape, mesh)

    def loss(hidden: Any, microbatch: Any) -> tuple[Any, Any]:
        weight = policy[-1].vocabulary_weight()
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(hidden @ weight.t())
        logprob_T = logits[:, : shape.vocab].log_softmax(-1)
        logprob_T = logprob_T.gather(-1, microbatch.target_T[:, None])[:, 0]
        rows = microbatch.rows_T
        out = (logprob_T * given.advantage_T[rows].double()).sum()
        return out, logprob_T.detach()

    found = []
    for share in (False, True):
        assert packer.spec.share_prefixes, "auto shares where it can"
        one = replace(packer, spec=replace(packer.spec, budget=budget, share_prefixes=share))
        microbatches = one.pack(given, one.whole(given))
        policy_grads = [p for chunk in policy for p in chunk.parameters()]
        for parameter in policy_grads:
            parameter.grad = None
        records = forward_backward(policy, microbatches, loss)
        gradients = []
        for parameter in policy_grads:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=mesh.data_group)
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(gradient, group=mesh.tensor_group)
            gradients.append(gradient)
        exact = torch.zeros(len(given.action_index_T), dtype=torch.float64)
        for microbatch, record in zip(microbatches, records if mesh.is_last_stage else (), strict=False):
            exact[microbatch.rows_T] = record
        dist.all_reduce(exact, group=mesh.token_group)
        dist.all_reduce(exact, group=mesh.pipeline_group)
        found.append((exact, gradients, sum(m.distinct[0] for m in microbatches)))
    (plain_T, plain, whole), (shared_T, shared, distinct) = found
    apart = [
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
        for a, b in zip(plain, shared, strict=True)
    ]
    return {
        "log-probs": float((plain_T - shared_T).abs().max()),
        "gradients": max(apart),
        "parameters": sum(bool(gradient.any()) for gradient in plain),
        "tokens": (whole, distinct),
        "least": float(plain_T.max()),
    }


def stages() -> list[list[int]]:
    """Return the tokens of the micro-batches of four trajectories that begin alike, on a pipeline stage,
    ascending. For the second token of the third, the engine chose other experts in the layers of the last
    stage alone; for that of the fourth, each stage's are those that the other stage has elsewhere."""
    process.prepare(engine=False)
    import torch

    from megatron_stppo.config import ParallelConfig
    from megatron_stppo.data.division import Packer
    from megatron_stppo.data.packing import PackingSpec
    from megatron_stppo.parallel import groups
    from tests.data.test_prefixes import played

    mesh = groups.initialize(ParallelConfig(pipeline=2))
    given, stage = played((1, 2, 3), (1, 2, 4), (1, 2, 5), (1, 2, 6)), mesh.pipeline_rank
    routes_P = torch.full((12, 2, 1), stage, dtype=torch.uint8)
    routes_P[7], routes_P[10] = 2 * stage, 1 - stage
    packer = Packer(PackingSpec(100, share_prefixes=True), mesh, 8, "cpu", by_route=True)
    found = packer.pack(replace(given, routes_P=routes_P), packer.whole(given))
    return [sorted(one.tokens_P.tolist()) for one in found]


def dealt() -> list[list[int]]:
    """Return the division over two data-parallel ranks of trajectories of 11 tokens. The first three have a
    prompt of 10 tokens in common."""
    process.prepare(engine=False)
    from megatron_stppo.data.division import Packer
    from megatron_stppo.data.packing import PackingSpec
    from tests.data.test_prefixes import played

    given = played(*((*range(10), 20 + n) for n in range(3)), tuple(range(30, 41)), prompt=10)
    mesh: Any = SimpleNamespace(data_size=2)
    packer = Packer(PackingSpec(100, share_prefixes=True), mesh, 8, "cpu")
    return [list(part) for part in packer.whole(given).parts]


def obstacles() -> list[tuple[str, str]]:
    """Return the field or layers that a reason for sharing no prefixes names, and the first words of the
    error with update.share_prefixes=on: for context parallelism and for TransformerEngine's layers."""
    process.prepare(engine=False)
    from unittest import mock

    from megatron_stppo.config import Config, ConfigError
    from megatron_stppo.model import pipeline
    from megatron_stppo.parallel.layout import Layout

    found = []
    for layers, parallel in (("local", {"context": 2}), ("transformer_engine", {})):
        config = Config.model_validate(
            {"model": {"path": "m"}, "parallel": parallel, "update": {"share_prefixes": "on"}}
        )
        layout = Layout.of_world(2, config.parallel)
        with mock.patch.object(pipeline, "layer_spec", lambda config, layers=layers: layers):
            reason = pipeline.sharing_obstacle(config, layout)
            try:
                pipeline.packer_of(config, None, SimpleNamespace(layout=layout))
            except ConfigError as error:
                found.append((reason.split(":")[0].split("'")[0], str(error).split(": ")[0]))
    return found


def with_experts() -> list[int]:
    """Return the tokens of a rank's micro-batches, whose layers have collectives over both ranks, for the
    trajectories of `dealt` and a budget of one trajectory."""
    process.prepare(engine=False)
    from megatron_stppo.config import ParallelConfig
    from megatron_stppo.data.division import Packer
    from megatron_stppo.data.packing import PackingSpec
    from megatron_stppo.parallel import groups
    from tests.data.test_prefixes import played

    given = played(*((*range(10), 20 + n) for n in range(3)), tuple(range(30, 41)), prompt=10)
    mesh = groups.initialize(ParallelConfig(expert=2))
    packer = Packer(PackingSpec(11, share_prefixes=True), mesh, 8, "cpu")
    return [one.tokens for one in packer.pack(given, packer.whole(given))]


def kept() -> None:
    """Check which micro-batches a Packer makes again."""
    process.prepare(engine=False)
    import torch

    from megatron_stppo.base.types import ScoredBatch
    from megatron_stppo.config import ParallelConfig
    from megatron_stppo.data.division import Packer
    from megatron_stppo.data.packing import PackingSpec
    from megatron_stppo.parallel import groups
    from tests.data.test_prefixes import played

    given, mesh = played((1, 2, 3), (1, 2, 4), (1, 2, 5)), groups.initialize(ParallelConfig())
    for by_route in (False, True):
        packer = Packer(PackingSpec(100, share_prefixes=True), mesh, 8, "cpu", by_route)
        two, other = packer.divide(given, [2, 0]), packer.divide(given, [1])
        assert packer.pack(given, two)[0] is not packer.pack(given, two)[0]
        packer.keep([two, other])
        (one,) = packer.pack(given, two)
        scored = ScoredBatch.of(given, epochs=(), old_logprob_T=torch.zeros(6))
        assert packer.pack(scored, two)[0] is one
        assert packer.pack(scored, two.first(1))[0].tokens == 3
        assert packer.pack(replace(given, action_index_T=given.action_index_T.clone()), two)[0] is not one
        # the second token of the third trajectory has another expert
        routes_P = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 0], dtype=torch.uint8)[:, None, None]
        (routed,) = packer.pack(replace(given, routes_P=routes_P), two)
        assert (routed.tokens_P is one.tokens_P) != by_route and len(routed.tokens_P) == 4 + by_route
        assert routed.routes_P is not None and len(routed.routes_P) == len(routed.tokens_P)
        assert one.routes_P is None is packer.pack(scored, two)[0].routes_P
        packer.keep([two])
        assert packer.pack(given, two)[0] is one
        packer.keep([other])
        assert packer.pack(given, two)[0] is not one
