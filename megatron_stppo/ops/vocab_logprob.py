"""Log-probability, entropy and sum of squared probabilities of the targets, vocabulary-parallel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stppo.algorithm.vocabulary import Merged, logits_gradient, merge, shard_statistics
from megatron_stppo.ops.arguments import check


class _Shard(NamedTuple):
    vocab_start: int
    valid: int  # columns of true vocabulary; what follows is padding
    group: dist.ProcessGroup | None
    ignore_index: int


def vocab_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, sum_p_sq), float32 [T], of softmax(logits / temperature); all three differentiable.

    logits: float32 or bfloat16 [T, V_local], this rank's columns of the vocabulary from id vocab_start on;
    arithmetic is float32. target: int64 [T] global ids, equal on every rank of `group`. vocab_size: the true
    size; columns with a higher id are padding and take no part. temperature: a number or float32 [T], > 0.
    Rows whose target is ignore_index give 0 and receive no gradient, whatever they hold.
    Over a group of several ranks: one all-gather of [5, T] float32 forward, nothing backward; each rank's
    logits get their own columns' gradient, so every rank must pass the same cotangents.
    Raises ValueError naming the argument; a target that no shard holds raises on every rank of the group.
    """
    check("logits", logits, logits.device, (torch.float32, torch.bfloat16), (None, None))
    check("target", target, logits.device, (torch.int64,), (len(logits),))
    temperature_T = _temperature(temperature, logits)
    if vocab_start < 0 or (vocab_size is not None and vocab_size < 1):
        raise ValueError(
            f"vocab_start={vocab_start}, vocab_size={vocab_size}: give the first column's id and the size"
        )
    columns = logits.shape[1]
    valid = columns if vocab_size is None else min(max(vocab_size - vocab_start, 0), columns)
    shard = _Shard(vocab_start, valid, group, ignore_index)
    out: tuple[Tensor, Tensor, Tensor] = _VocabLogprob.apply(  # type: ignore[no-untyped-call]
        logits, target, temperature_T, shard
    )
    return out


class _VocabLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature_T: Tensor, shard: _Shard
    ) -> tuple[Tensor, Tensor, Tensor]:
        local = shard_statistics(logits, target, temperature_T, shard.vocab_start, shard.valid)
        merged = merge(_all_gather(local, shard.group))
        ignored_T = target == shard.ignore_index
        _check_targets(target, merged.missing_T & ~ignored_T)
        ctx.shard = shard
        ctx.save_for_backward(
            logits,
            target,
            temperature_T,
            ignored_T,
            merged.logprob_T,
            merged.entropy_T,
            merged.sum_p_sq_T,
            merged.max_T,
            merged.log_sum_T,
            merged.missing_T,
        )
        ctx.set_materialize_grads(False)
        logprob, entropy, sum_p_sq = (
            value.masked_fill(ignored_T, 0)
            for value in (merged.logprob_T, merged.entropy_T, merged.sum_p_sq_T)
        )
        return logprob, entropy, sum_p_sq

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, target, temperature_T, ignored_T, *merged = ctx.saved_tensors
        g, h, c = cotangents
        # The logits are not overwritten: their producer may have saved them, and nothing here can tell.
        gradient = logits_gradient(
            logits,
            target,
            temperature_T,
            ctx.shard.vocab_start,
            ctx.shard.valid,
            Merged(*merged),
            ignored_T,
            (g, h, c),
        )
        return gradient, None, None, None


def _all_gather(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[5, T] of this rank -> [W, 5, T] in rank order. T is the same on all ranks of the group."""
    if group is None or dist.get_world_size(group) == 1 or local.shape[1] == 0:
        return local[None]
    world = dist.get_world_size(group)
    out = local.new_empty(world * local.shape[0], local.shape[1])
    dist.all_gather_into_tensor(out, local, group=group)
    return out.view(world, *local.shape)


def _check_targets(target: Tensor, missing_T: Tensor) -> None:
    """Decided on gathered numbers, so that all ranks raise together and none waits for another."""
    if not bool(missing_T.any()):
        return
    row = int(missing_T.nonzero()[0])
    raise ValueError(
        f"target[{row}]={int(target[row])} lies outside every shard's columns; "
        "pass global ids below vocab_size, or ignore_index"
    )


def _temperature(temperature: float | Tensor, logits: Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        check("temperature", temperature, logits.device, (torch.float32,), (len(logits),))
    elif not temperature > 0:
        raise ValueError(f"temperature={temperature} divides the logits; choose a number > 0")
    else:
        return torch.full((len(logits),), float(temperature), device=logits.device)
    if not bool((temperature > 0).all()):
        raise ValueError("temperature holds a row that is not above 0; it divides the logits")
    return temperature
