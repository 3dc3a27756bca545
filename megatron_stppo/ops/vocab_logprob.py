"""Log-probability of targets, entropy and sum of squared probabilities from vocabulary-parallel logits."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stppo.algorithm.vocabulary import Merged, logits_gradient, merge, shard_statistics
from megatron_stppo.ops import extension
from megatron_stppo.ops.extension import check, has_data
from megatron_stppo.ops.shard import IGNORED, Shard


def vocab_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprob, entropy, sum_p_sq) of softmax(logits / temperature), float32 [T], all differentiable.

    logits: float32 or bfloat16 [T, V_local], this rank's columns of the vocabulary from id vocab_start on.
    Arithmetic is float32.
    target: int64 [T], global ids, equal on every rank of `group`. Rows with the target -100 (IGNORED) give 0
    and receive a gradient of 0, even if their logits are NaN.
    vocab_size: the true size; columns whose id is not below it are padding and are left out.
    temperature: a number or float32 [T], > 0.
    overwrite: the backward writes the gradient over the logits instead of into new memory. Use it if the
    module that produced the logits does not need them in its own backward, such as a linear layer.

    A row's results and gradient have the same bits whatever other rows are passed with it. The torch fallback
    on a GPU does not promise this, because torch chooses the order of a sum there by the number of rows.

    With a group of several ranks the forward does one all-gather of [5, T] float32 and the backward no
    communication. Each rank's logits get the gradient of their own columns, so every rank must pass the same
    cotangents.
    Raises ValueError that names the argument that does not fit. If no shard holds a target, all ranks of the
    group raise; the extension on a GPU reads nothing back to the host, so there the row is NaN instead.
    """
    check("logits", logits, logits.device, (torch.float32, torch.bfloat16), (None, None))
    check("target", target, logits.device, (torch.int64,), (len(logits),))
    shard = Shard.of(target, logits.shape[1], vocab_start, vocab_size, temperature)
    out: tuple[Tensor, Tensor, Tensor] = _VocabLogprob.apply(  # type: ignore[no-untyped-call]
        logits, shard, group, overwrite
    )
    return out


class _VocabLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, shard: Shard, group: dist.ProcessGroup | None, overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        merged = merge_shards(all_gather(local_statistics(logits, shard), group), shard)
        ctx.shard, ctx.overwrite, ctx.overwritten = shard, overwrite, False
        ctx.save_for_backward(logits, merged)
        ctx.set_materialize_grads(False)
        logprob, entropy, sum_p_sq = merged.narrow(0, 0, 3).clone().unbind()
        return logprob, entropy, sum_p_sq

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError("overwrite=True: the first backward overwrote the logits; run it once only")
        ctx.overwritten = ctx.overwrite
        logits, merged = ctx.saved_tensors
        out = logits if ctx.overwrite else torch.empty_like(logits)
        write_gradient(logits, ctx.shard, merged, cotangents, out)
        if ctx.overwrite:
            torch.autograd.graph.increment_version(logits)  # so that autograd detects other uses
        return out, None, None, None


def local_statistics(logits: Tensor, shard: Shard) -> Tensor:
    """Return shard_statistics of algorithm/vocabulary.py for this rank's columns, float32 [5, T]."""
    if not extension.applies(logits):
        return shard_statistics(logits, shard.target, shard.temperature_T, shard.vocab_start, shard.valid)
    out = torch.empty(5, len(logits), dtype=torch.float32, device=logits.device)
    if has_data(logits):
        extension.run("vocab_statistics", logits.device, shard.record(logits), out)
    return out


def merge_shards(statistics: Tensor, shard: Shard) -> Tensor:
    """Merge the statistics [W, 5, T] of W shards into float32 [6, T].

    The rows are logprob, entropy, sum p^2 (these three 0 for ignored targets), max, log sum, and a flag that
    the target is missing. Raises ValueError for a target that no shard holds. This is decided from the
    gathered statistics, so all ranks raise together and none waits in a collective.
    """
    shards, _, rows = statistics.shape
    if extension.applies(statistics):
        out = torch.empty(6, rows, dtype=torch.float32, device=statistics.device)
        if not has_data(statistics):
            return out
        settings = (shards, rows, shard.target, IGNORED)
        extension.run("vocab_merge", statistics.device, statistics, *settings, out)
        missing_T = None if out.is_cuda else out[5].view(torch.uint8)[:rows]
    else:
        m, ignored_T = merge(statistics), shard.target == IGNORED
        values = [x.masked_fill(ignored_T, 0) for x in (m.logprob_T, m.entropy_T, m.sum_p_sq_T)]
        out = torch.stack([*values, m.max_T, m.log_sum_T, m.missing_T.float()])
        missing_T = m.missing_T & ~ignored_T
    if missing_T is not None and bool(missing_T.any()):
        row = int(missing_T.nonzero()[0])
        raise ValueError(
            f"target[{row}]={int(shard.target[row])} lies outside every shard's columns; "
            "pass global ids below vocab_size, or -100"
        )
    return out


def write_gradient(
    logits: Tensor, shard: Shard, merged: Tensor, cotangents: Sequence[Tensor | None], out: Tensor
) -> Tensor:
    """Write the gradient of the logits into `out` and return it.

    cotangents: of the first three rows of `merged`, None for 0. `out` may be `logits`.
    """
    g_T, h_T, c_T = cotangents
    if not extension.applies(logits):
        place = (shard.target, shard.temperature_T, shard.vocab_start, shard.valid)
        ignored_T = shard.target == IGNORED
        return out.copy_(logits_gradient(logits, *place, Merged(*merged), ignored_T, (g_T, h_T, c_T)))
    if has_data(logits):
        dense = [None if x is None else x.contiguous() for x in (g_T, h_T, c_T)]
        extension.run("vocab_gradient", logits.device, shard.record(logits), merged, *dense, out)
    return out


def all_gather(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the [5, T] tensors of all ranks of the group as [W, 5, T], in rank order. Collective.

    T is the same on all ranks of the group.
    """
    if group is None or dist.get_world_size(group) == 1 or local.shape[1] == 0:
        return local.unsqueeze(0)
    world = dist.get_world_size(group)
    out = local.new_empty(world * local.shape[0], local.shape[1])
    dist.all_gather_into_tensor(out, local, group=group)
    return out.view(world, *local.shape)
