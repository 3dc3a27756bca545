"""Output of plans and of forecasts, as tables or as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_stppo.plan.assumptions import ALL, GIB, OF_LENGTHS
from megatron_stppo.plan.dry_run import Plan
from megatron_stppo.plan.outlook import Outlook, Planner


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values, in bytes, seconds and FLOP.

    `phases` holds the bytes of every item, by stage and phase.
    """
    use = plan.use
    return {
        "gpu": asdict(plan.gpu) | {"usable": plan.gpu.usable},
        "layout": asdict(use.layout) | {"world": use.layout.world},
        "layers": use.layers,
        "dtype": str(use.dtype).removeprefix("torch."),
        "work": asdict(use.work) | {"microbatch_tokens": use.microbatch_tokens},
        "engine": asdict(plan.engine) | {"cached_tokens": plan.engine.cached_tokens},
        "stages": [
            asdict(stage) | {"phases": stage.phases(*plan.beside), "totals": stage.totals(*plan.beside)}
            for stage in use.stages
        ],
        "reshard": asdict(plan.exchange),
        "host": asdict(plan.host),
        "sharing": asdict(use.sharing),
        "bounds": asdict(plan.bounds),
        "broken": list(plan.broken),
    }


def write_plan(plan: Plan, in_json: bool) -> None:
    """Write the plan to standard output."""
    if in_json:
        print(json.dumps(plan_as_json(plan), indent=1))
        return
    fullest = max(plan.use.stages, key=lambda stage: max(stage.totals(*plan.beside).values()))
    phases, totals = fullest.phases(*plan.beside), fullest.totals(*plan.beside)
    table = _table("", *phases)
    for item in dict.fromkeys(item for items in phases.values() for item in items):
        cells = (f"{items[item] / GIB:.2f}" if item in items else "" for items in phases.values())
        table.add_row(item, *cells)
    table.add_section()
    table.add_row("total", *(f"{total / GIB:.2f}" for total in totals.values()))
    of = f", stage {fullest.stage}" if plan.use.layout.pipeline > 1 else ""
    console = _console()
    console.print(_opening(plan), soft_wrap=True)
    console.print(f"GiB per GPU{of}; {plan.gpu.usable / GIB:.1f} are available", table, sep="\n")
    for line in _lines(plan):
        console.print(line, soft_wrap=True)


def _console() -> Console:
    return Console(width=110, highlight=False)


def _table(first: str, *others: str) -> Table:
    """Return an empty table with these columns, of which all but the first are numbers."""
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _opening(plan: Plan) -> str:
    use = plan.use
    at, c = use.layout, use.config
    axes = {"tensor": at.tensor, "context": at.context, "expert": at.expert}
    axes |= {"pipeline": at.pipeline, "virtual": at.virtual, "data": at.data}
    mesh = ", ".join(f"{name} {size}" for name, size in axes.items() if size > 1 or name == "data")
    adapters = f", adapters of rank {c.model.lora.rank}" if c.model.lora.rank else ""
    return (
        f"{plan.shape.family}, {plan.shape.layers} layers, hidden {plan.shape.hidden}, on {at.world} "
        f"{plan.gpu.name}: {mesh}; engines of {c.engine_tensor}\n"
        f"{str(use.dtype).removeprefix('torch.')}, {use.layers} layers, recompute {c.model.recompute}"
        f"{adapters}; {use.microbatch_tokens} tokens in a microbatch, {use.work.microbatches} microbatches "
        "per step"
    )


def _lines(plan: Plan) -> Iterator[str]:
    moves, times, engine, host = plan.exchange, plan.bounds, plan.engine, plan.host
    longest, sharing = plan.use.work.longest, plan.use.sharing
    totals = (item for stage in plan.use.stages for item in stage.totals(*plan.beside).items())
    phase, fullest = max(totals, key=itemgetter(1))
    yield f"slack: at least {(plan.gpu.usable - fullest) / GIB:.1f} GiB, in {phase}"
    yield (
        f"engine: keys and values of {engine.cached_tokens} tokens, {engine.cached_tokens // longest} "
        f"trajectories of {longest} at once; its working memory is estimated, not measured"
    )
    yield (
        f"reshard: {moves.copies} copies, every row once; {moves.moved / 1e9:.1f} GB between GPUs "
        f"({moves.ratio:.2f} of the minimum), {moves.between_nodes / 1e9:.1f} GB between nodes, "
        f"{moves.at_home / 1e9:.1f} GB stay on their GPU"
    )
    yield (
        f"checkpoint: {host.checkpoint / 1e9:.1f} GB on disk; host memory of a node: "
        f"{host.copies / 1e9:.1f} GB for a copy while it is written, {host.offloaded / 1e9:.1f} GB with "
        f"update.offload={plan.use.config.update.offload}"
    )
    share = "all" if sharing.distinct == 1 else f"{100 * sharing.distinct:.0f} %"
    yield f"tokens computed: {share} of the trajectories' ({sharing.reason})"
    yield (
        f"time at least: rollout {times.rollout:.1f} s, score {times.score:.1f} s, update {times.update:.1f} "
        f"s, reshard {times.reshard:.2g} s; at most {times.tokens_per_second:.3g} tokens/s of "
        f"{times.tokens} tokens per iteration"
    )
    yield from (f"assumed: {source}" for source in plan.gpu.sources)
    yield "does not fit" if plan.broken else "fits"


def write_outlooks(
    planner: Planner, outlooks: Sequence[Outlook], lengths_from: str | None, in_json: bool
) -> None:
    """Write forecasts to standard output.

    lengths_from: the run whose lengths and shared prefixes were used; None if lengths were assumed and
    sharing was not counted.
    """
    if in_json:
        values = [asdict(o) | {"best": o.best and asdict(o.best), "gain": o.gain} for o in outlooks]
        print(json.dumps({"assumed": dict(planner.assumed), "outlooks": values}, indent=1))
        return
    console = _console()
    console.print(
        f"{planner.batch} episodes per iteration, {planner.tokens:.0f} tokens each; {planner.concurrency} "
        f"episodes in progress per replica; {planner.gpu.name}",
        soft_wrap=True,
    )
    for outlook in outlooks:
        if outlook.splits or outlook.together is not None:
            console.print(f"{outlook.gpus} GPUs", _splits(outlook, planner.config.serving.replicas), sep="\n")
        for line in (*outlook.left_out, *verdict(outlook)):
            console.print(line, soft_wrap=True)
    if lengths_from:
        console.print(f"lengths and shared prefixes: those of {lengths_from}", soft_wrap=True)
    for name, value in planner.assumed.items():
        if lengths_from is None or name not in OF_LENGTHS:
            console.print(f"assumed: {name}={value:g} {ALL[name].meaning}", soft_wrap=True)
    for source in ("a step's times for weights, keys and values, and FLOP add up", *planner.gpu.sources):
        console.print(f"assumed: {source}", soft_wrap=True)


def _splits(outlook: Outlook, configured: int | None) -> Table:
    """Return a row for colocated training, and one for each split."""
    columns = ("replicas", "seconds", "tokens/s", "trainer\nwaits", "sends\nweights", "replicas\nidle")
    table = _table("training", *columns, "staleness", "")
    rows = [("colocated", "", outlook.together, "")] if outlook.together else []
    for split in outlook.splits:
        marks = ["best"] * (split is outlook.best) + ["configured"] * (split.replicas == configured)
        rows.append(
            (str(split.trainer), f"{split.replicas} x {split.tensor}", split.forecast, ", ".join(marks))
        )
    for training, replicas, forecast, marked in rows:
        table.add_row(
            training,
            replicas,
            f"{forecast.iteration_seconds:.1f}",
            f"{forecast.tokens_per_second:.0f}",
            f"{forecast.waiting / forecast.iteration_seconds:.0%}",
            f"{forecast.publishing / forecast.iteration_seconds:.0%}",
            f"{forecast.replica_idle:.0%}",
            f"{forecast.staleness_mean:.1f} (max {max(forecast.staleness)})",
            marked,
        )
    return table


def verdict(outlook: Outlook) -> Iterator[str]:
    """Yield what follows from the forecasts, in sentences."""
    if outlook.best is None:
        yield f"{outlook.gpus} GPUs: asynchronous training is not possible"
        return
    if outlook.gain is not None:
        times = f"{outlook.gain:.2f} times as fast as colocated training"
        yield f"{outlook.gpus} GPUs: asynchronous training is {times}"
    if (waiting := outlook.best.forecast.calls_waiting) > 1:
        yield f"{waiting:.0f} calls of tools per replica wait for a place: raise environment.concurrency"
