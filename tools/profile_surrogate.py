"""Measure how the time of a clipped_surrogate call is divided among kernel, call and autograd.

python tools/profile_surrogate.py [--tokens 131072] [--turn 256] [--threads 2]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from benchmark_measure import implementation, percentiles
from benchmark_opponents import CLIP
from rich.console import Console
from rich.table import Table

from megatron_stppo import ops

surrogate = sys.modules["megatron_stppo.ops.clipped_surrogate"]
CALLS = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--turn", type=int, default=256, help="tokens of a turn")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    total = given.tokens
    offsets = torch.tensor([*range(0, total, given.turn), total])
    logprob = (-3 * torch.rand(total)).requires_grad_()
    old, advantage, weight = (
        logprob.detach() + 0.18 * torch.randn(total),
        torch.randn(total),
        torch.rand(total),
    )
    inputs = (logprob.detach(), old, advantage, weight, 0.0, offsets)
    bounds = (CLIP, CLIP, None, "mean")
    outputs = (
        torch.empty(len(offsets) - 1),
        torch.empty(total),
        None,
        torch.empty(surrogate.TOTALS),
    )

    def call() -> torch.Tensor:
        clips = {"clip_low": CLIP, "clip_high": CLIP}
        return ops.clipped_surrogate(logprob, old, advantage, offsets, weight=weight, **clips).objective

    parts: dict[str, Callable[[], object]] = {
        "the kernel, into allocated memory": lambda: surrogate.run(*inputs, bounds, None, outputs),
        "+ checks, allocations, autograd's node": call,
        "+ backward": lambda: torch.autograd.grad(call(), logprob),
    }
    table = Table(
        "part", "p10, us", "median, us", "p90, us", title=f"{total:,} tokens in turns of {given.turn}"
    )
    with implementation("extension"):
        for name, function in parts.items():
            times = percentiles([_seconds(function) for _ in range(CALLS)])
            table.add_row(name, *(f"{1e6 * t:.0f}" for t in times))
    Console(width=100).print(table)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
