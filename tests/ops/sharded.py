"""The function that each rank of test_vocab_parallel runs, in its own file so that ranks import little."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron_stppo import ops

# 13 vocabulary columns on two ranks with 8 columns each: rank 1 has 5 and 3 of padding. 5 rows; one is
# ignored.
VOCABULARY, COLUMNS = 13, 8
TARGET = torch.tensor([0, 7, 8, 12, -100])


def whole_logits():
    logits = torch.randn(5, 2 * COLUMNS, generator=torch.Generator().manual_seed(0)) * 4
    logits[1, COLUMNS:] = -math.inf  # a row that rank 1 cannot contribute to
    logits[:, VOCABULARY:] = math.nan
    return logits


def evaluate(logits, **place):
    logits = logits.clone().requires_grad_()
    outputs = ops.vocab_logprob(logits, TARGET, temperature=0.7, vocab_size=VOCABULARY, **place)
    sum((i + 1.0) * out.sum() for i, out in enumerate(outputs)).backward()
    return [out.detach() for out in outputs], logits.grad


def on_a_rank():
    start = dist.get_rank() * COLUMNS
    place = {"vocab_start": start, "group": dist.group.WORLD}
    shard = whole_logits()[:, start : start + COLUMNS].contiguous()
    result = evaluate(shard, **place)
    try:
        ops.vocab_logprob(shard, torch.full((5,), VOCABULARY), vocab_size=VOCABULARY, **place)
    except ValueError as error:
        complaint = str(error)
    empty = ops.vocab_logprob(shard[:0], TARGET[:0], **place)
    return *result, complaint, [len(out) for out in empty]
