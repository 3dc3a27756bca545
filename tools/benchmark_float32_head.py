"""Measure the cost of float32 logits for a bfloat16 model, and the errors of log-probs with and without them.

    python tools/benchmark_float32_head.py [--repeats 5]

Times are the processor time of one thread for ops.linear_loss, forward and backward, on a CPU. Errors are
differences from float64 with the same bfloat16 arguments: the mean absolute difference of the log-probs, and
the relative difference of the gradient of the hidden states. Sizes are (tokens, hidden size, vocabulary).
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from megatron_stppo import ops

SIZES = ((256, 256, 4096), (256, 512, 32768), (512, 1024, 16384))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| tokens, hidden, vocabulary | logits | ms | error of log-probs, nats | error of the gradient |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        measure(size, repeats)


def measure(size: tuple[int, int, int], repeats: int) -> None:
    rows, width, columns = size
    torch.manual_seed(0)
    hidden = torch.randn(rows, width).bfloat16().requires_grad_()
    weight = (torch.randn(columns, width) * 2 / width**0.5).bfloat16().requires_grad_()
    target, factor = torch.randint(0, columns, (rows,)), torch.randn(rows)
    logits = hidden.double() @ weight.double().t()
    exact = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    (exact_gradient,) = torch.autograd.grad((exact * factor).sum(), hidden)

    def loss(chunk: ops.Chunk) -> tuple[Tensor, Tensor]:
        return (factor[chunk.first : chunk.last] * chunk.logprob).sum(), torch.zeros(1)

    for float32_logits in (False, True):
        milliseconds = []
        for _ in range(repeats):
            began = time.process_time()
            total, _, logprob = ops.linear_loss(
                hidden, weight, target, [0, rows], loss, float32_logits=float32_logits
            )
            gradient, _ = torch.autograd.grad(total, (hidden, weight))
            milliseconds.append(1e3 * (time.process_time() - began))
        error = float((logprob.double() - exact.detach()).abs().mean())
        off = float((gradient - exact_gradient).norm() / exact_gradient.norm())
        kind = "float32" if float32_logits else "bfloat16"
        numbers = f"{statistics.median(milliseconds):.0f} | {error:.1e} | {off:.1e}"
        print(f"| {rows}, {width}, {columns} | {kind} | {numbers} |")


if __name__ == "__main__":
    main()
