"""Compare a reshard with a plain all_to_all_single of the same bytes, on the ranks that torchrun starts.

    torchrun --standalone --nproc-per-node 2 tools/benchmark_reshard.py [--layers 4] [--source float32]
        [--target bfloat16] [--pairs tensor=2:1 pipeline=2:2 data=2:2] [--rounds 15] [--output FILE.json]

A pair is TRAINING:ENGINE: the axes of `parallel:`, and the engine's tensor parallel size. The backend is NCCL
if there is a GPU for every rank, otherwise gloo. Every round calls all variants in turn. A time is that of
the slowest rank, measured from a barrier. The variants are:

    reshard        a whole weight sync of random weights, with checksums of every copy on both ranks
    plain          one all_to_all_single of the bytes that must cross between ranks, already packed
    local copies   a rank's copies with casts: into the packed buffer, out of it, and within the rank
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from megatron_stppo.config import ConfigError
from megatron_stppo.config.file import validate
from megatron_stppo.families.llama import Qwen3
from megatron_stppo.ops import BucketCopy
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.validation.model_layout import check_layout, check_stages
from megatron_stppo.weights.reshard.plan import RowCopy, lower_bound, plan_copies
from megatron_stppo.weights.reshard.resharder import Resharder
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.spans import PADDING, row_widths, serving_layouts, training_layouts
from tools.measuring import headline, machine, markdown, percentiles, synchronize

RESHARD, PLAIN, LOCAL = "reshard", "plain", "local copies"


@dataclass(frozen=True)
class Measured:
    """Results of one pair. Times are [p10, median, p90] in seconds."""

    pair: str
    moved: int  # bytes that cross between ranks, summed over ranks
    kept: int  # bytes that stay on their rank, summed over ranks
    bound: int  # the least number of bytes that must cross between ranks
    buckets: int
    times: dict[str, list[float]]  # by variant; without PLAIN if nothing crosses

    @property
    def ratio(self) -> float:
        return 1.0 if self.moved == self.bound else self.moved / max(self.bound, 1)


def model(given: argparse.Namespace) -> ModelShape:
    """Return a Qwen3 shape: heads of 128, half as many KV heads, an MLP of 3 x hidden, untied embeddings."""
    heads = given.hidden // 128
    sizes = (given.layers, given.hidden, heads, max(1, heads // 2), 128, 3 * given.hidden, given.vocab)
    return Qwen3("qwen3", *sizes, False, 1e4, 1e-6, 4096)


def measure(pair: str, shape: ModelShape, given: argparse.Namespace, device: torch.device) -> Measured:
    """Measure one pair. Raises ConfigError if it does not fit the ranks or the model."""
    training, _, engine_tensor = pair.partition(":")
    rank, world = dist.get_rank(), dist.get_world_size()
    if not engine_tensor.isdecimal() or int(engine_tensor) not in range(1, world + 1):
        raise ConfigError(f"--pairs {pair!r} is not TRAINING:ENGINE; for example tensor=2:1")
    sizes = axes(training)
    sizes.pop("data", None)  # the remaining ranks
    parallel = validate({"model": {"path": "."}, "parallel": sizes}).parallel
    layout = Layout.of_world(world, parallel)
    check_layout(shape, parallel.tensor)
    check_stages(shape, layout)
    check_layout(shape, int(engine_tensor), field="rollout.engine_tensor", serving=True)
    train = training_layouts(shape, layout)
    engine, widths = serving_layouts(shape, world, int(engine_tensor)), row_widths(shape)
    source_type, target_type = getattr(torch, given.source), getattr(torch, given.target)
    source, target = (
        {name: tensor(spans, widths, dtype, device) for name, spans in side[rank].items()}
        for side, dtype in ((train, source_type), (engine, target_type))
    )
    sides = (source, target, train, engine, widths)
    resharder = Resharder(*sides, bucket_bytes=given.bucket_bytes)
    variants: dict[str, Callable[[], object]] = {}
    copies = list(plan_copies(train, engine, widths))
    sizes = traffic(copies, widths)
    to, come = sizes[rank], [row[rank] for row in sizes]
    send, receive = (torch.ones(sum(n), dtype=target_type, device=device) for n in (to, come))
    if any(map(any, sizes)):
        splits = [[n * target_type.itemsize for n in each] for each in (come, to)]
        as_bytes = receive.view(torch.uint8), send.view(torch.uint8)
        variants[PLAIN] = lambda: dist.all_to_all_single(*as_bytes, *splits)
    variants[LOCAL] = local(copies, rank, source, target, send, receive)
    variants[RESHARD] = lambda: resharder.sync(1)
    report = resharder.sync(1)
    return Measured(
        pair,
        report.bytes_moved,
        report.bytes_self,
        lower_bound(train, engine, widths) * target_type.itemsize,
        report.buckets,
        interleaved(variants, given.rounds, device),
    )


def tensor(
    spans: Sequence[tuple], widths: Mapping[str, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor of the shape that the spans tile, with its memory touched once.

    Width 1 gives a vector.
    """
    last = spans[-1]
    rows, width = (
        last.local + last.size,
        max((widths[s.hf_key] for s in spans if s.hf_key != PADDING), default=1),
    )
    shape = (rows,) if width == 1 else (rows, width) if last.dim == 0 else (width, rows)
    return torch.randn(shape, device=device).to(dtype)


def traffic(copies: Sequence[RowCopy], widths: Mapping[str, int]) -> list[list[int]]:
    """Return [source rank][target rank]: number of elements that cross between different ranks."""
    world = dist.get_world_size()
    sizes = [[0] * world for _ in range(world)]
    for copy in copies:
        if copy.source_rank != copy.target_rank:
            sizes[copy.source_rank][copy.target_rank] += copy.size * widths[copy.hf_key]
    return sizes


def local(
    copies: Sequence[RowCopy],
    rank: int,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    send: Tensor,
    receive: Tensor,
) -> BucketCopy:
    """Return one op with all copies of the rank: into `send`, out of `receive`, and within the rank."""
    pairs, sent, received = [], 0, 0
    for copy in copies:
        if copy.source_rank == rank:
            here = source[copy.source].narrow(copy.dim, copy.source_offset, copy.size)
        if copy.target_rank == rank:
            there = target[copy.target].narrow(copy.dim, copy.target_offset, copy.size)
        if copy.source_rank == copy.target_rank == rank:
            pairs.append((here, there))
        elif copy.source_rank == rank:
            pairs.append((here, send[sent : sent + here.numel()].view(here.shape)))
            sent += here.numel()
        elif copy.target_rank == rank:
            pairs.append((receive[received : received + there.numel()].view(there.shape), there))
            received += there.numel()
    return BucketCopy([a for a, _ in pairs], [b for _, b in pairs])


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return [p10, median, p90] of each variant. The first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            dist.barrier()
            synchronize()
            begin = time.perf_counter()
            run()
            synchronize()
            slowest = torch.tensor(time.perf_counter() - begin, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:
                seconds[name].append(float(slowest))
    return {name: percentiles(each) for name, each in seconds.items()}


def table(found: Sequence[Measured]) -> str:
    rows = []
    for row in found:
        middle = {variant: times[1] for variant, times in row.times.items()}
        cells = ["-"] if PLAIN not in row.times else []
        for low, median, high in row.times.values():
            cells.append(f"{1e3 * median:.0f} ({1e3 * low:.0f}-{1e3 * high:.0f})")
        ratio = f"{middle[RESHARD] / middle[PLAIN]:.2f}x" if PLAIN in middle else "-"
        both = f"{middle[RESHARD] / (middle[LOCAL] + middle.get(PLAIN, 0.0)):.2f}x"
        sizes = (f"{row.moved / 1e6:.0f}", f"{row.ratio:.3f}", f"{row.kept / 1e6:.0f}", row.buckets)
        rows.append((row.pair, *sizes, *cells, ratio, both))
    head = ("pair", "moved MB", "/ bound", "kept MB", "buckets", PLAIN, LOCAL, RESHARD, "/ plain", "/ both")
    return markdown(head, rows)


def axes(text: str) -> dict[str, int]:
    """Return {"tensor": 2, "pipeline": 2} for "tensor=2,pipeline=2". Raises ConfigError."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, sign, value = part.partition("=")
        if not sign or not value.isdecimal():
            raise ConfigError(f"--train {part!r} is not AXIS=NUMBER; for example tensor=2,pipeline=2")
        found[name] = int(value)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--source", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--target", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--pairs", nargs="+", default=["tensor=2:1", "pipeline=2:2", "data=2:2"])
    parser.add_argument("--bucket-bytes", type=int, help="default: that of the resharder")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    given = parser.parse_args(arguments)
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        found = [measure(pair, model(given), given, device) for pair in given.pairs]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        rank, ranks, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        dist.destroy_process_group()
    if rank == 0:
        about = machine(device.type) | vars(given) | {"ranks": ranks, "backend": backend}
        print(f"{headline(about)}; {ranks} ranks over {backend}, {given.source} -> {given.target}")
        print(f"Times in ms, median (p10-p90)\n\n{table(found)}")
        if given.output:
            rows = [asdict(row) | {"ratio": row.ratio} for row in found]
            record = {"about": about, "rows": rows}
            given.output.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
