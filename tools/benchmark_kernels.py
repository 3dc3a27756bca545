"""Compare every op of megatron_stppo.ops with other implementations: time, memory traffic, float64 error.

    python tools/benchmark_kernels.py [--quick] [--device cpu|cuda] [--threads N] [--output FOLDER]

Prints tables, and writes kernels.json into FOLDER. docs/performance.md explains the numbers.
STPPO_OPS is set for each variant: to `extension` for "fused", so that it raises an error instead of using a
fallback, and to `torch` for "fallback". Exits with 2 if the extension is not built for the device.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from megatron_stppo.ops import extension
from tools.kernels import report
from tools.kernels.copies import Copies, copy_rows
from tools.kernels.logprobs import linear_rows, vocab_rows
from tools.kernels.measure import Bench, Row, implementation, scratch_bytes
from tools.kernels.surrogate import TURN_SETS, surrogate_rows
from tools.measuring import machine

PASSES = ("forward", "backward", "forward + backward")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure. `budget` is in seconds per group of variants that are called in turn."""

    turns: int  # tokens of each turn-length set
    sets: Sequence[str]
    vocab: Sequence[tuple[int, int, torch.dtype]]  # rows, columns
    passes: Sequence[str]
    linear: Sequence[tuple[int, int, int, torch.dtype]]  # T, H, V
    valid: Sequence[float]
    copies: Sequence[Copies]
    budget: float
    cold: bool


def sizes(device: str, quick: bool) -> Sizes:
    sets = list(TURN_SETS)[: 2 if quick else None]
    valid = (1.0,) if quick else (1.0, 0.5, 0.25)
    if device == "cpu":
        vocab = [(1024, 32768, FLOAT32), (1024, 32768, BFLOAT16)]
        linear = [(512, 256, 8192, FLOAT32)] if quick else [(1024, 512, 32768, FLOAT32)]
        passes = PASSES[2:] if quick else PASSES
        budget, tokens = (0.4, 131072) if quick else (4.0, 131072)
    else:
        shards = [18992] if quick else [18992, 151936]
        vocab = [(rows, n, BFLOAT16) for n in shards for rows in ((4096,) if quick else (512, 4096, 32768))]
        heads = [(2048, 151936), (3584, 152064), (5120, 151936), (8192, 128256), (7168, 129280)]
        linear = [(8192, h, v, BFLOAT16) for h, v in heads[: 1 if quick else None]]
        linear += [] if quick else [(32768, 8192, 128256 // 8, BFLOAT16)]  # a local shard, no collective
        passes = PASSES
        budget, tokens = 0.3, 2**22
    # one whole weight, columns of weights, norms
    copies = [(1, 4096, 4096, 4096), (16, 1024, 512, 1024), (400, 1, 4096, 4096)]
    return Sizes(tokens, sets, vocab, passes, linear, valid, copies, budget, cold=not quick)


def not_compiled(device: str, quick: bool) -> str:
    """Return why torch.compile is not measured, or an empty string."""
    if quick and device == "cpu":
        return "left out by --quick: compiling takes longer than all the rest"
    return "TORCHDYNAMO_DISABLE is set" if os.environ.get("TORCHDYNAMO_DISABLE", "0") not in ("", "0") else ""


def main(arguments: Sequence[str] | None = None, chosen: Sizes | None = None, scratch: int = 0) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: at most 40 s on 2 CPU cores")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    parser.add_argument("--output", type=Path, default=Path("runs/kernels"), metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; default 2")
    given = parser.parse_args(arguments)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(given.threads)
    try:
        with implementation("extension"):
            extension.serves(torch.device(device))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    s, missing = chosen or sizes(device, given.quick), not_compiled(device, given.quick)
    bench = Bench(device, s.budget, 3 if given.quick else 7, scratch or scratch_bytes(device))
    rows: list[Row] = []
    for section in (
        surrogate_rows(bench, s.turns, s.sets, missing, s.cold),
        vocab_rows(bench, s.vocab, s.passes, missing, s.cold),
        linear_rows(bench, s.linear, s.valid, s.cold),
        copy_rows(bench, s.copies, s.cold),
    ):
        bench.copy()
        for measured in section:
            rows += measured
            print(f"measured {measured[0].section}, {measured[0].size}", file=sys.stderr, flush=True)
    bench.copy()
    about = machine(device) | {"quick": given.quick, "copy_bandwidth": bench.copy_bandwidth}
    print(report.tables(about, rows))
    given.output.mkdir(parents=True, exist_ok=True)
    report.save(about, rows, given.output / "kernels.json")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
