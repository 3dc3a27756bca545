"""Output of a plan, as tables or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_stppo.plan.dry_run import Plan
from megatron_stppo.plan.hardware import GIB
from megatron_stppo.plan.phases import StageUse


def as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values, in bytes, seconds and FLOP.

    `phases` holds the bytes of every item, by stage and phase.
    """
    return {
        "gpu": asdict(plan.gpu) | {"usable": plan.gpu.usable},
        "layout": asdict(plan.layout) | {"world": plan.layout.world},
        "layers": plan.layers,
        "dtype": plan.dtype,
        "work": asdict(plan.work) | {"microbatch_tokens": plan.microbatch_tokens},
        "engine": asdict(plan.engine) | {"cached_tokens": plan.engine.cached_tokens},
        "stages": [
            asdict(one)
            | {
                "phases": one.phases(*plan.beside),
                "totals": one.totals(*plan.beside),
            }
            for one in plan.stages
        ],
        "reshard": asdict(plan.exchange),
        "host": asdict(plan.host),
        "bounds": asdict(plan.bounds)
        | {"seconds": plan.bounds.seconds, "tokens_per_second": plan.bounds.tokens_per_second},
        "broken": list(plan.broken),
    }


def write(plan: Plan, in_json: bool) -> None:
    """Write the plan to standard output."""
    if in_json:
        print(json.dumps(as_json(plan), indent=1))
    else:
        show(plan, Console(width=110, highlight=False))


def show(plan: Plan, console: Console) -> None:
    console.print(_opening(plan), soft_wrap=True)
    fullest = max(plan.stages, key=lambda one: max(one.totals(*plan.beside).values()))
    of = f", stage {fullest.stage}" if plan.layout.pipeline > 1 else ""
    console.print(f"GiB per GPU{of}; {plan.gpu.usable / GIB:.1f} are available")
    console.print(_memory(plan, fullest))
    if plan.layout.pipeline > 1:
        console.print("GiB per GPU by pipeline stage")
        console.print(_stages(plan))
    for line in _lines(plan):
        console.print(line, soft_wrap=True)


def _opening(plan: Plan) -> str:
    at, c = plan.layout, plan.config
    axes = {"tensor": at.tensor, "context": at.context, "expert": at.expert}
    axes |= {"pipeline": at.pipeline, "virtual": at.virtual, "data": at.data}
    mesh = ", ".join(f"{name} {size}" for name, size in axes.items() if size > 1 or name == "data")
    adapters = f", adapters of rank {c.model.lora.rank}" if c.model.lora.rank else ""
    return (
        f"{plan.shape.family}, {plan.shape.layers} layers, hidden {plan.shape.hidden}, on {at.world} "
        f"{plan.gpu.name}: {mesh}; engines of {c.engine_tensor}\n"
        f"{plan.dtype}, {plan.layers} layers, recompute {c.model.recompute}{adapters}; "
        f"{plan.microbatch_tokens} tokens in a microbatch, {plan.work.microbatches} microbatches per step"
    )


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
    for name in plan.stages[0].totals(*plan.beside):
        table.add_column(name, justify="right")
    for one in plan.stages:
        table.add_row(
            str(one.stage),
            str(one.ranks),
            str(one.layers),
            f"{one.models['actor'].parameters / 1e9:.2f} B",
            _gib(sum(one.held("update", plan.config.update.offload).values())),
            _gib(max(one.in_flight.values())),
            *(_gib(total) for total in one.totals(*plan.beside).values()),
        )
    return table


def _lines(plan: Plan) -> list[str]:
    moves, times, engine, gpu, host = plan.exchange, plan.bounds, plan.engine, plan.gpu, plan.host
    last = plan.stages[-1]
    lines = [
        f"logits: one chunk takes {_gib(last.logits)} GiB of the last stage's working memory",
        f"engine: keys and values of {engine.cached_tokens} tokens, "
        f"{engine.cached_tokens // plan.work.longest} trajectories of {plan.work.longest} at once",
        f"reshard: {moves.copies} copies, every row once; {moves.moved / 1e9:.1f} GB between GPUs "
        f"({moves.ratio:.2f} of the minimum), {moves.between_nodes / 1e9:.1f} GB between nodes, "
        f"{moves.at_home / 1e9:.1f} GB stay on their GPU",
        f"checkpoint: {host.checkpoint / 1e9:.1f} GB on disk; host memory of a node: "
        f"{host.copies / 1e9:.1f} GB for a copy while it is written, {host.offloaded / 1e9:.1f} GB with "
        f"update.offload={plan.config.update.offload}",
        f"time at least: rollout {times.rollout:.1f} s, score {times.score:.1f} s, update {times.update:.1f} "
        f"s, reshard {times.reshard:.2g} s; at most {times.tokens_per_second:.3g} tokens/s of "
        f"{times.tokens} tokens per iteration",
        *(f"assumed: {source}" for source in gpu.sources),
        "estimated instead of measured: the engine's working memory",
    ]
    if plan.config.model.layers == "auto" and not plan.config.model.lora.rank:
        lines.append(
            "planned with local layers; model.layers=auto uses TransformerEngine's where it is installed"
        )
    return [*lines, "fits" if not plan.broken else "does not fit"]


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"
