"""Show what a reshard between two layouts moves, computed without a device or a process group.

    python tools/show_reshard_plan.py MODEL_FOLDER --train tensor=8,pipeline=2 --ranks 16 --engine-tensor 8

MODEL_FOLDER needs only config.json. --train takes the fields of `parallel:` in a run's configuration; data
parallelism uses the remaining ranks. Prints:

    - the number of copies
    - the bytes that stay on their rank, that move within a node and that move between nodes
    - the bytes of the busiest rank and node
    - the bytes that any plan must move

The bytes are counted as in `megatron-stppo plan` (plan/exchange.py). Exits with 2 if a layout does not fit
the model or the ranks. With --lora, such as rank=32,sync=adapter, the reshard is the one after an update of
adapters (docs/lora.md), for an engine that has kept its weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config_file import validate
from megatron_stppo.plan.exchange import ReshardCost, exchange, layers_to_plan
from megatron_stppo.plan.hardware import H100
from megatron_stppo.sharding.hf_names import read_shape
from megatron_stppo.sharding.spans import serving_layouts, training_layouts
from megatron_stppo.sharding.transfers import served_adapters, transfers
from megatron_stppo.validation.lora import check as check_lora
from megatron_stppo.validation.model_layout import check_engine, check_parallel

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def planned(config: Config, ranks: int, ranks_per_node: int, item_bytes: int) -> ReshardCost:
    """Plan the reshard and count bytes.

    Raises ConfigError if a layout does not fit the model or the ranks.
    """
    layout = check_parallel(config, ranks)
    check_engine(config, ranks)
    shape = read_shape(config.model.path)
    check_lora(config)
    train, engine = training_layouts(shape, layout), serving_layouts(shape, ranks, config.engine_tensor)
    gpu, layers = replace(H100, per_node=ranks_per_node), layers_to_plan(shape, layout)
    update = transfers(shape, train, engine, served_adapters(config.model.lora, shape)).each
    return exchange(*update, layers, item_bytes, gpu)


def settings(text: str) -> dict[str, str]:
    """Return {"rank": "4", "sync": "adapter"} for "rank=4,sync=adapter". Raises ConfigError."""
    parts = [part.partition("=") for part in text.split(",") if part]
    if odd := ["".join(part) for part in parts if not part[1]]:
        raise ConfigError(f"--lora {odd[0]!r} is not FIELD=VALUE; for example rank=32,sync=adapter")
    return {name: value for name, _, value in parts}


def axes(text: str) -> dict[str, Any]:
    """Return {"tensor": 2, "pipeline": 2} for "tensor=2,pipeline=2". Raises ConfigError."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, sign, value = part.partition("=")
        if not sign or not value.isdecimal():
            raise ConfigError(f"--train {part!r} is not AXIS=NUMBER; for example tensor=2,pipeline=2")
        found[name] = int(value)
    return found


def show(found: ReshardCost, title: str, planning: float) -> None:
    """Print the tables. `planning` is the time that planning took, in seconds."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    console.print(title, highlight=False)
    table = Table("from a rank to", "bytes", "share")
    within = found.moved - found.between_nodes
    pairs = {"same rank": found.at_home, "same node": within, "other node": found.between_nodes}
    for name, size in pairs.items():
        table.add_row(name, f"{size:,}", f"{size / (found.at_home + found.moved):.1%}")
    console.print(table)
    console.print(
        f"{found.copies:,} copies, every row once\n"
        f"busiest rank: {found.busiest_rank:,} bytes one way; busiest node: {found.busiest_node:,}\n"
        f"between ranks: {found.moved:,} bytes, lower bound {found.least:,}: {found.ratio:.3f} x\n"
        f"at least {found.seconds:.2g} s over the links of {H100.name}; planned in {planning:.3g} s",
        highlight=False,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL_FOLDER", help="a folder with config.json")
    parser.add_argument("--train", default="", metavar="AXIS=N,..", help="such as tensor=2,pipeline=2")
    parser.add_argument("--lora", default="", metavar="FIELD=V,..", help="such as rank=32,sync=adapter")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--engine-tensor", type=int, help="default: that of --train")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="bfloat16", help="dtype of the engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args(arguments)
    begin = time.perf_counter()
    try:
        for name in ("ranks", "ranks_per_node"):
            if getattr(given, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag}={getattr(given, name)} must be at least 1; raise it")
        sections = {"parallel": axes(given.train), "rollout": {"engine_tensor": given.engine_tensor}}
        config = validate({"model": {"path": given.model, "lora": settings(given.lora)}, **sections})
        found = planned(config, given.ranks, given.ranks_per_node, ITEM_BYTES[given.dtype])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    tensor, planning = config.engine_tensor, time.perf_counter() - begin
    if given.json:
        about = {"model": str(given.model), "train": given.train, "lora": given.lora, "ranks": given.ranks}
        about |= {"engine_tensor": tensor, "ranks_per_node": given.ranks_per_node, "dtype": given.dtype}
        print(json.dumps(about | asdict(found) | {"ratio": found.ratio, "planning_seconds": planning}))
    else:
        title = f"{given.model.resolve().name}: {given.train or 'data parallel'} on {given.ranks} ranks"
        show(found, f"{title} -> {given.ranks // tensor} engines of {tensor}, {given.dtype}", planning)
    return 0


if __name__ == "__main__":
    sys.exit(main())
