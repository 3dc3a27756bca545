"""Measure memory and processor time of a training step with all weights and with adapters, on one CPU rank.

    python tools/measure_adapters.py [--hidden 512] [--layers 8] [--repeats 3]

The model is a random Qwen2 in float32 with a vocabulary of 8,192. A batch of 8 trajectories of 128 tokens, in
two micro-batches, is scored, and actor and critic each take a step. MiB are those of live tensors: what
the models keep, and what the call adds at its peak. Seconds are medians of the processor time of one thread.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from tests.plan import real_step
from tests.ranks import run_ranks

RANKS = (0, 4, 16, 64)
CALLS = ("score", "actor step", "critic step")
LIMIT = 1800  # seconds for all cases of a measurement
KEPT = ("weights", "gradients", "optimizer")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": given.hidden, "intermediate_size": 5 * given.hidden // 2, "vocab_size": 8192}
        real_step.write_model(Path(folder), num_hidden_layers=given.layers, **sizes)
        cases = [(folder, {"lora": {"rank": rank}} if rank else {}, {}) for rank in RANKS]
        (memory,) = run_ranks(real_step.measured, 1, cases, timeout=LIMIT)
        (seconds,) = run_ranks(timed, 1, cases, given.repeats, timeout=LIMIT)
    print("| trained | weights | gradients, states | " + " | ".join(f"{x}: MiB, s" for x in CALLS) + " |")
    print("|---" * (3 + len(CALLS)) + "|")
    for rank, bytes_of, seconds_of in zip(RANKS, memory, seconds, strict=True):
        weights, *others = (sum(bytes_of[f"{role} {x}"] for role in ("actor", "critic")) for x in KEPT)
        weights += bytes_of["trunk"] + bytes_of["reference weights"]
        calls = [f"{bytes_of[x] / 2**20:.1f}, {seconds_of[x]:.2f}" for x in CALLS]
        name = f"rank {rank}" if rank else "all weights"
        print(f"| {name} | {weights / 2**20:.1f} | {sum(others) / 2**20:.1f} | {' | '.join(calls)} |")


def timed(cases: list[Any], repeats: int) -> list[dict[str, float]]:
    """Run on a rank. Return {call: median seconds} for every case."""
    import torch
    from megatron.core import parallel_state

    from megatron_stppo.launch import process

    process.prepare(engine=False)
    torch.set_num_threads(1)

    def measure(name: str, call: Callable[[], Any]) -> tuple[Any, float]:
        took = []
        for _ in range(repeats if name in CALLS else 1):
            began = time.process_time()
            out = call()
            took.append(time.process_time() - began)
        return out, statistics.median(took)

    found = []
    for case in cases:
        found.append(real_step.run(real_step.settings(*case), measure))
        gc.collect()
        parallel_state.destroy_model_parallel()
    return found


if __name__ == "__main__":
    main()
