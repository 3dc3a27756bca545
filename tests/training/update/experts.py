"""Functions that run on a rank: a step with replayed experts, and a checkpoint of experts shared by ranks."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_stppo.cluster.launch import process
from tests.training.update.faults import state_of
from tests.training.update.layouts import SETTINGS, batch


def observe(model: str, folder: str, parallel: dict[str, Any], recompute: str) -> dict[str, Any]:
    """Return the observations that test_experts checks."""
    process.prepare(engine=False)
    import torch
    from megatron.core import tensor_parallel

    from megatron_stppo.checkpoint import saving
    from megatron_stppo.config import Config
    from megatron_stppo.model import build
    from megatron_stppo.model.pipeline import logprobs, packer_of
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.model.routing_replay import recording
    from megatron_stppo.parallel import groups
    from megatron_stppo.parallel.collectives import all_reduce_max
    from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights
    from megatron_stppo.weights.sharding.hf_names import read_shape

    torch.set_num_threads(1)
    config = Config.model_validate(
        {
            "model": {"path": model, "recompute": recompute},
            "parallel": parallel,
            "update": {"actor": SETTINGS},
            "algorithm": {"preset": "st_ppo", "routing_replay": "old_policy", "correction": "gradient"},
        }
    )
    mesh, a, given = groups.initialize(config.parallel), config.algorithm, batch()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    shape = read_shape(Path(model))
    actor = build.trainer("actor", shape, config, mesh, torch.float32)
    packer = packer_of(config, shape, mesh)
    packer = replace(packer, spec=replace(packer.spec, budget=24))
    every = packer.whole(given)
    head = PolicyHead.of(actor.model, mesh, shape.vocab, segments=a.segments)

    def routes() -> tuple[Any, Any]:
        """Return the actor's log-probs and the routes of the trajectories that this rank trains on."""
        with recording(actor.chunks) as record:
            own_T = logprobs(actor.model, head, batch(), packer, [every])
            return own_T, record.routes(len(given.tokens_P))

    own_T, old = routes()
    given = replace(given, old_logprob_T=own_T + given.old_logprob_T)
    start = state_of(actor)

    def step(**changes: Any) -> Any:
        """Return the step's numbers, and every map from tokens to experts that it used."""
        at = replace(given, **changes)
        loss = ActorLoss(at, minibatch_weights(at, every.chosen, a), a, head)
        with routed(actor.chunks) as used:
            numbers = actor_step(actor, loss, every, packer).metrics
        return numbers, used

    saver = saving.Saver(Path(folder), config, mesh.layout)
    saver.save(1, {"actor": actor}, {"iteration": 1})
    plain, plain_maps = step()  # while the checkpoint is written
    saver.finish()
    saver.load({"actor": actor})
    loaded = all(torch.equal(x, y) for x, y in zip(start, state_of(actor), strict=True))
    same, same_maps = step(routes_P=old)
    for chunk in actor.chunks:  # as if many updates had moved the routers
        for name, parameter in chunk.named_parameters():
            if name.endswith("router.weight"):
                parameter.data.neg_()
    _, new = routes()
    everywhere = partial(all_reduce_max, group=mesh.tensor_and_token_group)  # of all data-parallel ranks
    chosen_P = everywhere(old)
    _, used = step(routes_P=old)
    replayed = packer.pack(replace(given, routes_P=old), every)
    return {
        "routes": chosen_P.tolist(),
        "moved": float((chosen_P.sort(-1)[0] != everywhere(new).sort(-1)[0]).float().mean()),
        "uses": uses(used, expected(replayed, shape.experts, mesh, parallel)),
        "dummies": sum(int((microbatch.rows_P < 0).sum()) for microbatch in replayed),
        "plain maps": Counter(map(fingerprint, plain_maps)),
        "replayed maps": Counter(map(fingerprint, same_maps)),
        "loaded": loaded,
        "differs": {name: (plain[name], same[name]) for name in plain if plain[name] != same[name]},
    }


def recorded_again() -> tuple[int, int]:
    """Return for how many micro-batches tokens that repeat others are known, in two recordings of one."""
    process.prepare(engine=False)
    import torch

    from megatron_stppo.data.packing import PackingSpec, pack
    from megatron_stppo.model.routing_replay import Routing, recording

    chunk: Any = torch.nn.Module()
    chunk.config = SimpleNamespace(sequence_parallel=False, num_moe_experts=4)
    chunk.routing = Routing(chunk, None)  # type: ignore[arg-type]
    counts = []
    for _ in range(2):
        with recording([chunk]):
            (microbatch,) = pack(batch(), range(8), PackingSpec(1000, share_prefixes=True))
            chunk.routing.begin(microbatch)
            counts.append(len(chunk.routing.repeated))
    return counts[0], counts[1]


@contextmanager
def routed(chunks: Any) -> Any:
    """Collect the maps [tokens, experts] that routers pass to their dispatchers, in call order."""
    from megatron.core.transformer.moe.router import TopKRouter

    used: list[Any] = []
    hooks = [
        module.register_forward_hook(lambda module, given, answer: used.append(answer[1].bool().clone()))
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, TopKRouter)
    ]
    yield used
    for hook in hooks:
        hook.remove()


def fingerprint(routed: Any) -> bytes:
    return bytes(routed.flatten().tolist())


def uses(used: list[Any], maps: list[Any]) -> list[int]:
    """Return how often each of `maps` was used, compared on live tokens, and the number of other maps."""
    import torch

    counts = [0] * (len(maps) + 1)
    for each in used:
        fits = [
            n
            for n, (own, live) in enumerate(maps)
            if len(own) == len(each) and torch.equal(own[live], each[live])
        ]
        # two micro-batches may have equal maps in a layer
        counts[min(fits, key=counts.__getitem__, default=-1)] += 1
    return counts


def expected(microbatches: Any, experts: int, mesh: Any, parallel: dict[str, Any]) -> list[Any]:
    """Return (map [tokens, experts], live tokens [tokens]) of every microbatch and layer on this rank."""
    import torch

    maps = []
    for microbatch in microbatches:
        own_P = microbatch.routes_P.long()
        if parallel.get("sequence"):
            own_P = own_P.chunk(mesh.tensor_size)[mesh.tensor_rank]
        live = own_P[:, 0, 0] >= 0
        for layer in range(own_P.shape[1]):
            chosen = own_P[:, layer].clamp(min=0)
            maps.append((torch.zeros(len(own_P), experts).scatter(1, chosen, 1.0).bool(), live))
    return maps
