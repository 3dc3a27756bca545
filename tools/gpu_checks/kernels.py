"""Calls of every op: once for compute-sanitizer, and repeatedly for bitwise equality."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_stppo import ops
from tests.ops.draws import (
    logprob_and_gradient,
    normal,
    offsets_of,
    rows,
    same_bits,
    three,
    unaligned,
    uniform,
)
from tools.measuring import synchronize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def calls() -> dict[str, Any]:
    """Run every op once, forward and backward, on small inputs that cover every path of its kernels."""
    from tests.ops.test_two_phases import test_two_parts_of_every_turn_make_the_whole as two_phases

    os.environ["STPPO_OPS"] = "extension"
    with torch.device(DEVICE):
        lengths = [1, 0, 40_000, 33_000, 5, 300, 700, *[3] * 50, *[150] * 1000]  # two groups of tickets
        total = sum(lengths)
        settings = {"weight": uniform(total), "sum_p_sq": uniform(total, seed=1), "with_bias": True}
        for segments in (None, offsets_of(*lengths)):
            new, old, advantage = three(total)
            out = ops.clipped_surrogate(new.requires_grad_(), old, advantage, segments, **settings)
            out.objective.backward()
        two_phases("mean", None, 0.0, 0.5)
        two_phases("mean", 1.5, 1.0, 0.5)
        for columns in (1003, 4096):
            for dtype in (torch.float32, torch.bfloat16):
                logits, target = rows(3, columns)
                logprob_and_gradient(logits.to(dtype), target, temperature=0.5 + uniform(3))
                logprob_and_gradient(unaligned(logits.to(dtype)), target, vocab_size=columns)
        wide, narrow = normal(40, 33), torch.empty(40, 17, dtype=torch.bfloat16)
        ops.BucketCopy([wide[:, :17], wide[:, 16:]], [narrow, torch.empty(40, 17)])()
        ops.BucketChecksum([wide[:, :17], wide, narrow], [torch.bfloat16, torch.float32, torch.bfloat16])()
        large = normal(64, 4096)  # several pieces of 16 bytes per load, several blocks
        ops.BucketCopy([large], [large.bfloat16()])()
        ops.BucketChecksum([large], [torch.bfloat16])()
        for dtype in (torch.float32, torch.bfloat16):
            hidden, weight = (normal(n, 32).to(dtype).requires_grad_() for n in (64, 1003))
            target = rows(64, 1003)[1]
            ops.linear_logprob(hidden, weight, target, [0, 17, 34, 64])
            weight.main_grad = torch.zeros(weight.shape)
            ops.linear_loss(hidden, weight, target, [0, 0, 20, 64], a_third)[0].backward()
    synchronize()
    return {}


def a_third(chunk: Any) -> tuple[Any, Any]:
    """Return the loss of a chunk in which two of three rows have no gradient."""
    logprob = chunk.logprob
    kept = torch.arange(len(logprob), device=logprob.device) % 3 == 0
    return logprob.masked_fill(~kept, 0).sum(), logprob.detach().sum().reshape(1)


def repeats() -> dict[str, Any]:
    """Run each op 100 times at the size of a training step, and compare the bits. On a CPU, 5 times."""
    os.environ["STPPO_OPS"] = "extension"
    again, vocab, longer = (99, 151_936, 5000) if DEVICE == "cuda" else (4, 4096, 50)
    differ = {}
    with torch.device(DEVICE):
        lengths = [131_072, 40_000, 33_000, *[150] * longer, *[1] * 1000]
        total, cut = sum(lengths), offsets_of(*lengths)
        settings = {"weight": uniform(total), "sum_p_sq": uniform(total, seed=1), "with_bias": True}
        given, (logits, target) = three(total), rows(256, vocab)
        narrow = logits.bfloat16()
        head = [normal(n, 512).bfloat16().requires_grad_() for n in (4096, vocab)]
        labels = rows(4096, vocab)[1]

        checksum = ops.BucketChecksum([logits, narrow], [torch.bfloat16] * 2)

        def linear_loss() -> Sequence[torch.Tensor]:
            total, *_ = ops.linear_loss(*head, labels, [0, 1500, 4096], a_third)
            return total, *torch.autograd.grad(total, head)

        def linear_logprob() -> Sequence[torch.Tensor]:
            return ops.linear_logprob(*head, labels, [0, 1500, 4096])

        def copied() -> Sequence[torch.Tensor]:
            out = torch.empty(logits.shape, dtype=torch.bfloat16)
            ops.BucketCopy([logits], [out])()
            return [out]

        ops_of: dict[str, Callable[[], Sequence[torch.Tensor]]] = {
            "clipped_surrogate by turn": lambda: ops.clipped_surrogate(*given, cut, **settings),
            "clipped_surrogate by token": lambda: ops.clipped_surrogate(*given, **settings),
            "vocab_logprob float32": lambda: logprob_and_gradient(logits, target),
            "vocab_logprob bfloat16": lambda: logprob_and_gradient(narrow, target),
            "bucket_copy": copied,
            "bucket_checksum": lambda: [checksum()],
            "linear_loss bfloat16": linear_loss,
            "linear_logprob bfloat16": linear_logprob,
        }
        for name, evaluate in ops_of.items():
            first = evaluate()
            differ[name] = sum(not same_bits(first, evaluate()) for _ in range(again))
            print(f"{name}: {differ[name]} of {again} repeats differ", flush=True)
    if any(differ.values()):
        raise AssertionError(f"these ops give other bits when they are repeated: {differ}")
    return {"repeats": again, "differ": sum(differ.values())}
