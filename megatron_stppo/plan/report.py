"""Output of plans and of forecasts, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_stppo.plan.assumptions import ALL, OF_LENGTHS
from megatron_stppo.plan.dry_run import Plan
from megatron_stppo.plan.hardware import GIB
from megatron_stppo.plan.outlook import Outlook, Planner
from megatron_stppo.plan.simulation.asynchronous import Forecast
from megatron_stppo.plan.usage import StageUse

EVEN = 0.02  # relative difference of speeds that a forecast cannot tell apart


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values, in bytes, seconds and FLOP.

    `phases` holds the bytes of every item, by stage and phase.
    """
    use = plan.use
    return {
        "gpu": asdict(plan.gpu) | {"usable": plan.gpu.usable},
        "layout": asdict(use.layout) | {"world": use.layout.world},
        "layers": use.layers,
        "dtype": _name(use.dtype),
        "work": asdict(use.work) | {"microbatch_tokens": use.microbatch_tokens},
        "engine": asdict(plan.engine) | {"cached_tokens": plan.engine.cached_tokens},
        "stages": [
            asdict(one) | {"phases": one.phases(*plan.beside), "totals": one.totals(*plan.beside)}
            for one in use.stages
        ],
        "reshard": asdict(plan.exchange),
        "host": asdict(plan.host),
        "bounds": asdict(plan.bounds),
        "broken": list(plan.broken),
    }


def write_plan(plan: Plan, in_json: bool) -> None:
    """Write the plan to standard output."""
    if in_json:
        print(json.dumps(plan_as_json(plan), indent=1))
        return
    console, stages, pipeline = _console(), plan.use.stages, plan.use.layout.pipeline
    console.print(_opening(plan), soft_wrap=True)
    fullest = max(stages, key=lambda one: max(one.totals(*plan.beside).values()))
    of = f", stage {fullest.stage}" if pipeline > 1 else ""
    console.print(f"GiB per GPU{of}; {plan.gpu.usable / GIB:.1f} are available")
    console.print(_memory(plan, fullest))
    if pipeline > 1:
        console.print("GiB per GPU by pipeline stage")
        console.print(_stages(plan))
    for line in _lines(plan):
        console.print(line, soft_wrap=True)


def _console() -> Console:
    return Console(width=110, highlight=False)


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
        f"{_name(use.dtype)}, {use.layers} layers, recompute {c.model.recompute}{adapters}; "
        f"{use.microbatch_tokens} tokens in a microbatch, {use.work.microbatches} microbatches per step"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory(plan: Plan, fullest: StageUse) -> Table:
    """Return a table of the items of `fullest` by phase."""
    phases, totals = fullest.phases(*plan.beside), fullest.totals(*plan.beside)
    table = Table()
    table.add_column("")
    for phase in phases:
        table.add_column(phase, justify="right")
    for item in dict.fromkeys(item for items in phases.values() for item in items):
        table.add_row(item, *(_gib(items.get(item)) for items in phases.values()))
    table.add_section()
    table.add_row("total", *(_gib(total) for total in totals.values()))
    return table


def _stages(plan: Plan) -> Table:
    table = Table()
    for name in ("stage", "ranks", "layers", "parameters", "trainer", "in flight"):
        table.add_column(name, justify="right")
    for name in plan.use.stages[0].totals(*plan.beside):
        table.add_column(name, justify="right")
    for one in plan.use.stages:
        table.add_row(
            str(one.stage),
            str(one.ranks),
            str(one.layers),
            f"{one.models['actor'].parameters / 1e9:.2f} B",
            _gib(sum(one.held("update", plan.use.config.update.offload).values())),
            _gib(max(one.in_flight.values())),
            *(_gib(total) for total in one.totals(*plan.beside).values()),
        )
    return table


def _lines(plan: Plan) -> list[str]:
    moves, times, engine, gpu, host = plan.exchange, plan.bounds, plan.engine, plan.gpu, plan.host
    last = plan.use.stages[-1]
    lines = [
        f"logits: one chunk takes {_gib(last.logits)} GiB of the last stage's working memory",
        f"engine: keys and values of {engine.cached_tokens} tokens, "
        f"{engine.cached_tokens // plan.use.work.longest} trajectories of {plan.use.work.longest} at once",
        f"reshard: {moves.copies} copies, every row once; {moves.moved / 1e9:.1f} GB between GPUs "
        f"({moves.ratio:.2f} of the minimum), {moves.between_nodes / 1e9:.1f} GB between nodes, "
        f"{moves.at_home / 1e9:.1f} GB stay on their GPU",
        f"checkpoint: {host.checkpoint / 1e9:.1f} GB on disk; host memory of a node: "
        f"{host.copies / 1e9:.1f} GB for a copy while it is written, {host.offloaded / 1e9:.1f} GB with "
        f"update.offload={plan.use.config.update.offload}",
        f"time at least: rollout {times.rollout:.1f} s, score {times.score:.1f} s, update {times.update:.1f} "
        f"s, reshard {times.reshard:.2g} s; at most {times.tokens_per_second:.3g} tokens/s of "
        f"{times.tokens} tokens per iteration",
        *(f"assumed: {source}" for source in gpu.sources),
        "estimated instead of measured: the engine's working memory",
    ]
    if plan.use.config.model.layers == "auto" and not plan.use.config.model.lora.rank:
        lines.append(
            "planned with local layers; model.layers=auto uses TransformerEngine's where it is installed"
        )
    return [*lines, "fits" if not plan.broken else "does not fit"]


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def write_outlooks(
    planner: Planner, outlooks: Sequence[Outlook], lengths_from: str | None, in_json: bool
) -> None:
    """Write forecasts to standard output.

    lengths_from: the run whose lengths were used; None if they were assumed.
    """
    if in_json:
        found = [asdict(one) | {"best": one.best and asdict(one.best), "gain": one.gain} for one in outlooks]
        print(json.dumps({"assumed": dict(planner.given), "outlooks": found}, indent=1))
        return
    console, config, shape = _console(), planner.config, planner.shape
    console.print(
        f"{shape.family}, {shape.layers} layers, hidden {shape.hidden}, on {planner.gpu.name}; engines of "
        f"{config.engine_tensor}. {planner.batch} episodes per iteration, {planner.tokens:.0f} tokens each\n"
        f"serving.max_staleness={config.serving.max_staleness}, order={config.serving.order}, "
        f"update={config.serving.update}, {planner.concurrency} episodes in progress per replica",
        soft_wrap=True,
    )
    for one in outlooks:
        console.print(f"{one.gpus} GPUs")
        if one.splits or one.together is not None:
            console.print(_splits(one, config.serving.replicas))
        for line in (*one.left_out, *verdict(one)):
            console.print(line, soft_wrap=True)
    if lengths_from:
        console.print(f"lengths: those of {lengths_from}", soft_wrap=True)
    for name, value in planner.given.items():
        if lengths_from is None or name not in OF_LENGTHS:
            console.print(f"assumed: {name}={value:g} {ALL[name].meaning}", soft_wrap=True)
    console.print("assumed: a step's times for weights, keys and values, and FLOP add up")
    for source in planner.gpu.sources:
        console.print(f"assumed: {source}", soft_wrap=True)


def _splits(one: Outlook, configured: int | None) -> Table:
    """Return a row for colocated training, and one for each split."""
    table = Table()
    for name in ("training", "replicas", "seconds", "tokens/s", "trainer\nwaits", "sends\nweights"):
        table.add_column(name, justify="right")
    table.add_column("replicas\nidle", justify="right")
    table.add_column("staleness", justify="right")
    table.add_column("")
    if one.together is not None:
        table.add_row("colocated", "", *_cells(one.together), "")
        table.add_section()
    for each in one.splits:
        marks = ["best"] * (each is one.best) + ["configured"] * (each.replicas == configured)
        sizes = (str(each.trainer), f"{each.replicas} x {each.tensor}")
        table.add_row(*sizes, *_cells(each.forecast), ", ".join(marks))
    return table


def _cells(found: Forecast) -> tuple[str, ...]:
    return (
        _seconds(found.iteration_seconds),
        f"{found.tokens_per_second:.0f}",
        f"{found.waiting / found.iteration_seconds:.0%}",
        f"{found.publishing / found.iteration_seconds:.0%}",
        f"{found.replica_idle:.0%}",
        f"{found.staleness_mean:.1f} (max {max(found.staleness)})",
    )


def verdict(one: Outlook) -> list[str]:
    """Return what follows from the forecasts, in sentences."""
    best, together = one.best, one.together
    if best is None:
        return [f"asynchronous training is not possible on {one.gpus} GPUs"]
    found, lines = best.forecast, []
    if together is not None and one.gain is not None:
        sides = f"{_seconds(found.iteration_seconds)} s instead of {_seconds(together.iteration_seconds)} s"
        word = f"{one.gain:.2f} times as fast as" if one.gain > 1 + EVEN else "slower than"
        word = "as fast as" if abs(one.gain - 1) <= EVEN else word
        lines.append(
            f"asynchronous training is {word} colocated training on {one.gpus} GPUs: {sides} per iteration"
        )
    if found.calls_waiting > 1:
        lines.append(
            f"{found.calls_waiting:.0f} calls of tools per replica wait for a place: raise "
            "environment.concurrency"
        )
    return lines


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
