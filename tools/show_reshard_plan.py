"""What a reshard between two layouts moves, rank by rank, computed without a device or a process group.

    python tools/show_reshard_plan.py MODEL_FOLDER --train tensor=8,pipeline=2 --ranks 16 --engine-tensor 8

MODEL_FOLDER needs its config.json only. --train takes the fields of `parallel:` in a run's configuration;
data parallelism takes the ranks that are left. Prints the bytes and copies that stay on their rank, cross
within a node and cross between nodes, the busiest ranks, and the bytes that any plan must move. Exits with 2
for a layout that the model or the ranks do not admit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_stppo.config import Config, ConfigError, validate
from megatron_stppo.model.hf_names import read_shape
from megatron_stppo.model.spans import row_widths, serving_layouts, training_layouts
from megatron_stppo.reshard.plan import Copy, lower_bound, plan_copies
from megatron_stppo.runtime.checks import check_engine, check_parallel

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PAIRS = ("same rank", "same node", "other node")


@dataclass(frozen=True)
class Moved:
    bytes: int
    copies: int


@dataclass(frozen=True)
class Busiest:
    """The lowest of the ranks that send (or receive) most from (to) others."""

    rank: int
    bytes: int


@dataclass(frozen=True)
class Traffic:
    """Example: two ranks that each send half of a 1 MB model to the other: 1 MB on the same rank, 1 MB on the
    same node, each rank sends 0.5 MB, and `bound` is 1 MB."""

    pairs: dict[str, Moved]  # by PAIRS
    sends_most: Busiest
    receives_most: Busiest
    moved: int  # bytes between ranks
    bound: int  # the least bytes that must cross between ranks, whatever the plan
    seconds: float  # to plan, counting included

    @property
    def ratio(self) -> float:
        """Bytes moved / lower bound; 1 where both are 0."""
        return 1.0 if self.moved == self.bound else self.moved / max(self.bound, 1)


def traffic(config: Config, ranks: int, ranks_per_node: int, item_bytes: int) -> Traffic:
    """Plans and counts. Raises ConfigError for a layout that the model or the ranks do not admit."""
    layout = check_parallel(config, ranks)
    check_engine(config, ranks)
    shape = read_shape(config.model.path)
    train, engine = training_layouts(shape, layout), serving_layouts(shape, ranks, config.engine_tensor)
    widths = row_widths(shape)
    begin = time.perf_counter()
    copies = plan_copies(train, engine, widths, ranks_per_node=ranks_per_node)
    pairs, sent, received = _count(copies, widths, ranks_per_node, item_bytes)
    seconds = time.perf_counter() - begin
    moved = pairs["same node"].bytes + pairs["other node"].bytes
    bound = lower_bound(train, engine, widths) * item_bytes
    return Traffic(pairs, _busiest(sent, ranks), _busiest(received, ranks), moved, bound, seconds)


def _count(
    copies: Iterable[Copy], widths: Mapping[str, int], ranks_per_node: int, item_bytes: int
) -> tuple[dict[str, Moved], Counter[int], Counter[int]]:
    """(by kind of pair, bytes that each rank sends to others, bytes that each receives from others)."""
    size, number = Counter[str](), Counter[str]()
    sent, received = Counter[int](), Counter[int]()
    for copy in copies:
        of_bytes = copy.size * widths[copy.hf_key] * item_bytes
        source, target = copy.source_rank, copy.target_rank
        pair = PAIRS[(source != target) + (source // ranks_per_node != target // ranks_per_node)]
        size[pair] += of_bytes
        number[pair] += 1
        if source != target:
            sent[source] += of_bytes
            received[target] += of_bytes
    return {pair: Moved(size[pair], number[pair]) for pair in PAIRS}, sent, received


def _busiest(of_bytes: Counter[int], ranks: int) -> Busiest:
    rank = max(range(ranks), key=of_bytes.__getitem__)
    return Busiest(rank, of_bytes[rank])


def axes(text: str) -> dict[str, Any]:
    """{"tensor": 2, "pipeline": 2} from "tensor=2,pipeline=2". Raises ConfigError."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, sign, value = part.partition("=")
        if not sign or not value.isdecimal():
            raise ConfigError(f"--train {part!r} is not AXIS=NUMBER; for example tensor=2,pipeline=2")
        found[name] = int(value)
    return found


def show(found: Traffic, title: str) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    console.print(title, highlight=False)
    table = Table("from a rank to", "bytes", "share", "copies")
    total = sum(pair.bytes for pair in found.pairs.values())
    for name, pair in found.pairs.items():
        table.add_row(name, f"{pair.bytes:,}", f"{pair.bytes / total:.1%}", f"{pair.copies:,}")
    console.print(table)
    for verb, most in (("sent", found.sends_most), ("received", found.receives_most)):
        console.print(f"most bytes {verb} by a rank: {most.bytes:,} (rank {most.rank})", highlight=False)
    console.print(
        f"between ranks: {found.moved:,} bytes, lower bound {found.bound:,}: {found.ratio:.3f} x\n"
        f"planned in {found.seconds:.3g} s",
        highlight=False,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL_FOLDER", help="a folder with config.json")
    parser.add_argument("--train", default="", metavar="AXIS=N,..", help="such as tensor=2,pipeline=2")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--engine-tensor", type=int, help="default: that of --train")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="bfloat16", help="what the engine holds")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args(arguments)
    try:
        for name in ("ranks", "ranks_per_node"):
            if getattr(given, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag}={getattr(given, name)} must be at least 1; raise it")
        sections = {"parallel": axes(given.train), "rollout": {"engine_tensor": given.engine_tensor}}
        config = validate({"model": {"path": given.model}, **sections})
        found = traffic(config, given.ranks, given.ranks_per_node, ITEM_BYTES[given.dtype])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    tensor = config.engine_tensor
    if given.json:
        about = {"model": str(given.model), "train": given.train, "ranks": given.ranks}
        about |= {"engine_tensor": tensor, "ranks_per_node": given.ranks_per_node, "dtype": given.dtype}
        print(json.dumps(about | asdict(found) | {"ratio": found.ratio}))
    else:
        show(
            found,
            f"{given.model.resolve().name}: {given.train or 'data parallel'} on {given.ranks} ranks -> "
            f"{given.ranks // tensor} engines of {tensor}, {given.dtype}",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
