"""Output of the forecasts of asynchronous training, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_stppo.config import Config
from megatron_stppo.plan.assumptions import ALL, LENGTHS
from megatron_stppo.plan.colocated import ColocatedForecast
from megatron_stppo.plan.outlook import Outlook, Planner, SplitForecast

EVEN = 0.02  # relative difference of speeds that a forecast cannot tell apart
COLUMNS = (
    "training",
    "replicas",
    "seconds",
    "tokens/s",
    "trainer\nwaits",
    "sends\nweights",
    "replicas\nidle",
    "staleness",
    "episodes\nready",
    "",
)


def write(planner: Planner, outlooks: Sequence[Outlook], lengths_from: str | None, in_json: bool) -> None:
    """Write forecasts to standard output.

    lengths_from: the run whose lengths were used; None if they were assumed.
    """
    if in_json:
        found = [as_json(one) for one in outlooks]
        print(json.dumps({"assumed": dict(planner.given), "outlooks": found}, indent=1))
        return
    console = Console(width=110, highlight=False)
    config, shape = planner.config, planner.shape
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
            console.print(table(one, config))
        for line in (*one.left_out, *verdict(one)):
            console.print(line, soft_wrap=True)
    for line in assumptions(planner, lengths_from):
        console.print(line, soft_wrap=True)


def as_json(one: Outlook) -> dict[str, Any]:
    """Return an outlook as JSON values."""
    splits = [
        asdict(each.split)
        | {key: value for key, value in asdict(each.forecast).items() if key != "durations"}
        | {"trainer_idle": each.forecast.trainer_idle, "staleness_mean": each.forecast.staleness_mean}
        for each in one.splits
    ]
    together = None if one.together is None else asdict(one.together)
    if together is not None:
        del together["durations"]
    best = None if one.best is None else asdict(one.best.split)
    return {
        "gpus": one.gpus,
        "colocated": together,
        "splits": splits,
        "best": best,
        "enough": one.enough,
        "gain": one.gain,
        "left_out": list(one.left_out),
    }


def table(one: Outlook, config: Config) -> Table:
    """Return a row for colocated training, and one for each split."""
    drawn = Table()
    for name in COLUMNS:
        drawn.add_column(name, justify="right" if name else "left")
    if one.together is not None:
        drawn.add_row(*_colocated(one.together))
        drawn.add_section()
    for each in one.splits:
        marks = ["best"] * (each is one.best)
        marks += ["configured"] * (each.split.replicas == config.serving.replicas)
        drawn.add_row(*_split(each), ", ".join(marks))
    return drawn


def _colocated(found: ColocatedForecast) -> tuple[str, ...]:
    speed = f"{found.tokens_per_second:.0f}"
    return ("colocated", "", _seconds(found.iteration_seconds), speed, "", "", "", "0", "", "")


def _split(one: SplitForecast) -> tuple[str, ...]:
    found, split = one.forecast, one.split
    return (
        str(split.trainer),
        f"{split.replicas} x {split.tensor}",
        _seconds(found.iteration_seconds),
        f"{found.tokens_per_second:.0f}",
        f"{found.trainer_idle:.0%}",
        f"{found.publishing / found.iteration_seconds:.0%}",
        f"{found.replica_idle:.0%}",
        f"{found.staleness_mean:.1f} (max {found.staleness_max})",
        f"{found.buffered:.0f}",
    )


def verdict(one: Outlook) -> list[str]:
    """Return what follows from the forecasts, in sentences."""
    best, together = one.best, one.together
    if best is None:
        return [f"asynchronous training is not possible on {one.gpus} GPUs"]
    split, found = best.split, best.forecast
    lines = []
    if together is not None and one.gain is not None:
        sides = f"{_seconds(found.iteration_seconds)} s instead of {_seconds(together.iteration_seconds)} s"
        word = f"{one.gain:.2f} times as fast as" if one.gain > 1 + EVEN else "slower than"
        word = "as fast as" if abs(one.gain - 1) <= EVEN else word
        lines += [
            f"asynchronous training is {word} colocated training on {one.gpus} GPUs: {sides} per iteration",
            f"colocated: rollout {_seconds(together.rollout)} s, in which engines have nothing to generate "
            f"{together.rollout_idle:.0%} of the time, training {_seconds(together.training)} s on all GPUs, "
            f"switching {_seconds(together.switch)} s",
        ]
    lines.append(
        f"best split: training {_seconds(found.training)} s on {split.trainer} GPUs, waiting "
        f"{_seconds(found.waiting)} s, sending weights {_seconds(found.publishing)} s; {found.running:.0f} "
        f"sequences per engine step, {found.recomputed:.0f} tokens computed again because of updates"
    )
    if one.enough is not None:
        used = split.trainer + one.enough * split.tensor
        are = "1 replica" if one.enough == 1 else f"{one.enough} replicas"
        lines.append(f"{are} of {split.tensor} GPUs would do for this speed: {used} GPUs in all")
    if found.calls_waiting > 1:
        lines.append(
            f"{found.calls_waiting:.0f} calls of tools per replica wait for a place: raise "
            "environment.concurrency"
        )
    return lines


def assumptions(planner: Planner, lengths_from: str | None) -> list[str]:
    """Return a line for everything that is assumed."""
    lines = [f"lengths: those of {lengths_from}"] if lengths_from else []
    for name, value in planner.given.items():
        one = ALL[name]
        if lengths_from is None or one not in LENGTHS:
            unit = f" {one.unit}" if one.unit else ""
            lines.append(f"assumed: {name}={value:g}{unit} {one.meaning}")
    lines.append("assumed: a step's times for weights, keys and values, and FLOP add up")
    return [*lines, *(f"assumed: {source}" for source in planner.gpu.sources)]


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
