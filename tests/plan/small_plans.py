"""Functions that run in the planner's process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.plan.real_step import settings


def shared_kinds(layout: tuple[int, int, int]) -> list[tuple[int, dict[int, int]]]:
    """Return (first rank, {stage: ranks}) of an 8-layer model."""
    from megatron_stppo.families.llama import Qwen2
    from megatron_stppo.parallel.layout import Layout
    from megatron_stppo.plan.work import kinds
    from megatron_stppo.weights.sharding.spans import training_layouts

    shape = Qwen2("qwen2", 8, 64, 8, 4, 8, 96, 512, False, 1e6, 1e-6, 512)
    mesh = Layout(*layout)
    return [(kind.rank, dict(kind.stages)) for kind in kinds(mesh, training_layouts(shape, mesh))]


def warm_ups(pipeline: int, virtual: int, microbatches: int) -> list[tuple[list[int], list[int]]]:
    """Return per stage our and megatron's number of forward passes before the first backward."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    from megatron_stppo.parallel.layout import Layout
    from megatron_stppo.plan.memory import waiting

    found = []
    for stage in range(pipeline):
        group = SimpleNamespace(size=lambda: pipeline, rank=lambda stage=stage: stage)
        chunks = virtual if virtual > 1 else None
        at = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)
        total, _, count, _ = get_pp_rank_microbatches(microbatches, virtual, pipeline, p2p_communicator=at)
        order = [chunk for _, chunk in get_schedule_table(microbatches, virtual, pipeline)]
        ours = waiting(Layout(pipeline=pipeline, virtual=virtual), stage, microbatches)
        found.append((ours, order[: min(count, total - 1)]))
    return found


def limits(folder: str) -> dict[str, list[str]]:
    """Return the broken limits on GPUs with decreasing memory."""
    from megatron_stppo.plan.assumptions import H100
    from megatron_stppo.plan.dry_run import plan
    from megatron_stppo.plan.usage import broken

    config = settings(folder, {"dtype": "auto"}, {"tensor": 2, "sequence": True})
    made = plan(config, 2)
    cache = config.max_context * made.engine.cache_per_token  # of one trajectory
    stage, engine = made.use.stages[0], replace(made.engine, working=0, cache=cache)
    totals = stage.totals(engine, 0, "none")

    def lines(memory: int, engine: Any = engine, config: Any = config) -> list[str]:
        gpu = replace(H100, memory=memory, reserve=0)
        return list(broken(replace(made.use, config=config), gpu, engine))

    return {
        "all": list(made.broken),
        "update": lines(totals["update"] - 1),
        "recomputed": lines(
            totals["update"] - 1,
            config=config.model_copy(update={"model": config.model.model_copy(update={"recompute": "full"})}),
        ),
        "serving": lines(totals["update"], replace(engine, cache=totals["update"])),
        "offloaded": lines(
            totals["update"],
            replace(engine, cache=totals["update"]),
            config.model_copy(update={"update": config.update.model_copy(update={"offload": "all"})}),
        ),
        "resident": lines(sum(stage.held("update", "none").values())),
        "engine": lines(H100.memory, replace(engine, cache=cache - 1)),
    }


def sharing(
    folder: str,
    source: str,
    gpus: int,
    update: dict[str, Any],
    tasks: int,
    parallel: dict[str, int] | None = None,
) -> tuple[Any, Any, list[tuple[float, float]]]:
    """Return what a plan says of shared prefixes with a recorded run and without, and the seconds of score,
    of update and of the simulated trainer with it and without."""
    from megatron_stppo.commands.plan import _recorded
    from megatron_stppo.plan import assumptions
    from megatron_stppo.plan.assumptions import H100
    from megatron_stppo.plan.dry_run import plan
    from megatron_stppo.plan.times import trainer_speed

    config = settings(folder, {"dtype": "auto"}, parallel or {})
    parts = {"update": update, "rollout": {"tasks_per_iteration": tasks}}
    config = config.model_copy(
        update={name: getattr(config, name).model_copy(update=part) for name, part in parts.items()}
    )
    made = [plan(config, gpus, source=one) for one in (_recorded(config, Path(source)), None)]
    given = assumptions.read(config, ())
    speeds = [trainer_speed(one.use, config.max_context, H100, given).seconds(1000) for one in made]
    bounds = [(one.bounds.score, one.bounds.update) for one in made]
    seconds = [*zip(*bounds, strict=True), tuple(speeds)]
    return made[0].use.sharing, made[1].use.sharing, seconds


def head_types(folder: str) -> dict[str, tuple[int, int]]:
    """Return {head_dtype: (bytes of a chunk of logits, bytes that an update adds)} of a bfloat16 model."""
    from megatron_stppo.plan.dry_run import plan

    found = {}
    for head_dtype in ("auto", "float32", "model"):
        config = settings(folder, {"dtype": "auto", "head_dtype": head_dtype}, {})
        # chunks of so many rows that the head takes more memory than a layer
        update = config.update.model_copy(update={"logit_rows": 1000})
        (stage,) = plan(config.model_copy(update={"update": update}), 1).use.stages
        found[head_dtype] = (stage.logits, stage.models["actor"].working)
    return found


def flop(folder: str, rank: int) -> dict[str, tuple[int, int]]:
    """Return {part: (FLOP of a microbatch by the formula, counted FLOP)} on one GPU.

    rank: that of adapters; 0 without.
    """
    from megatron_stppo.observe.throughput import adapter_flop, forward_flop, training_flop
    from megatron_stppo.plan.dry_run import plan
    from megatron_stppo.plan.work import trajectory
    from megatron_stppo.weights.sharding.hf_names import read_shape

    config = settings(folder, {"dtype": "auto", "lora": {"rank": rank}}, {})
    made, shape = plan(config, 1), read_shape(config.model.path)
    models, longest = made.use.stages[0].models, config.max_context
    count = made.use.microbatch_tokens // longest
    assert made.use.microbatch_tokens == count * longest
    head = count * sum(len(turn.token_ids) for turn in trajectory(config, longest).turns)
    lengths, lora = [longest] * count, (rank, config.model.lora.names)
    added = adapter_flop(shape, lengths, *lora)
    policy, critic = forward_flop(shape, lengths, head) + added, forward_flop(shape, lengths) + added
    return {
        "actor scores": (policy, models["actor"].score_flop),
        "actor learns": (training_flop(shape, lengths, head, *lora), models["actor"].update_flop),
        "critic scores": (critic, models["critic"].score_flop),
        "critic learns": (training_flop(shape, lengths, 0, *lora), models["critic"].update_flop),
    }


def references(folder: str) -> list[tuple[int, int, int]]:
    """Return (bytes of the actor's trained weights, bytes of the reference's own weights, bytes of the frozen
    weights) with adapters that add 0, and with imported ones.

    A plan does not read the folder of the imported ones.
    """
    from megatron_stppo.plan.dry_run import plan

    found = []
    for path in (None, "adapters"):
        lora = {"rank": 4, "path": path}
        (stage,) = plan(settings(folder, {"dtype": "auto", "lora": lora}, {}), 1).use.stages
        actor, reference = stage.models["actor"], stage.models["reference"]
        found.append((actor.weights, reference.weights, stage.trunk))
    return found


def teachers(folder: str, others: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """Return (parameters of the reference's shape, planned ones of all stages, bytes of their weights) of
    models of other sizes, for a policy with adapters on 2 pipeline stages and 2 tensor ranks."""
    import math

    from megatron_stppo.plan.dry_run import plan
    from megatron_stppo.weights.sharding.hf_names import hf_shapes, read_shape

    found = []
    for other in others:
        model = {"dtype": "auto", "lora": {"rank": 4}, "reference_path": other}
        config = settings(folder, model, {"pipeline": 2, "tensor": 2, "sequence": True}, {"preset": "distil"})
        stages = plan(config, 4).use.stages
        used = [stage.models["reference"] for stage in stages]
        wanted = sum(math.prod(size) for size in hf_shapes(read_shape(Path(other))).values())
        found.append((wanted, sum(one.parameters for one in used), sum(one.weights for one in used)))
    return found


def newest(source: str, episodes: int) -> tuple[int, str]:
    """Return how many trajectories the first `episodes` episodes of the last iteration have, and how many
    episodes these are, as text."""
    from megatron_stppo.plan.work import newest_batch

    batch, found = newest_batch(Path(source), episodes)
    return len(batch.live_N), f"{found}"


def exchanging(dense: str, experts: str) -> list[tuple[set[str], set[str]]]:
    """Return (groups in which a dry run exchanges tensors of a GPU, those of groups.exchanges) by layout."""
    from unittest import mock

    import torch
    from torch.distributed import ProcessGroup

    from megatron_stppo.parallel import groups
    from megatron_stppo.plan.dry_run import plan
    from megatron_stppo.plan.meter import Meter, tensors_in

    met, listed, dispatch, of = set[str](), set[str](), Meter.__torch_dispatch__, groups.exchanges
    # the norm of the gradients, what stages send, recorded experts
    unplanned = {"INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "TENSOR_AND_CONTEXT_PARALLEL_GROUP"}
    unplanned |= {"PIPELINE_MODEL_PARALLEL_GROUP"}

    def seen(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and any(x.is_meta for x in tensors_in(args)):
            boxed = [
                x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
            ]
            met.update(g.group_desc for g in map(ProcessGroup.unbox, boxed) if g.size() > 1)
        return dispatch(self, func, types, args, kwargs)

    def noted(*given: Any) -> list[tuple[ProcessGroup, str]]:
        listed.update(group.group_desc for group, _ in of(*given))
        return of(*given)

    found = []
    with mock.patch.object(Meter, "__torch_dispatch__", seen), mock.patch.object(groups, "exchanges", noted):
        for folder, parallel in (
            (dense, {"tensor": 2, "sequence": True, "context": 2}),
            (dense, {"pipeline": 2, "virtual": 2}),
            (experts, {"tensor": 2, "sequence": True, "expert": 2}),
        ):
            met.clear()
            listed.clear()
            plan(settings(folder, {"dtype": "auto"}, parallel), 8)
            found.append((set(met), listed - unplanned))
    return found
