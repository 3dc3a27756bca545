"""From hidden states to log-probs without ever holding more than a chunk of logits.

`linear_logprob` is an ordinary differentiable op; its backward computes the logits of a chunk again (4 matrix
products). `linear_loss` is for a loss that is a sum over chunks, such as ST-PPO's over chunks of whole turns:
the gradient of a chunk's logits is known as soon as they are there, so it takes 3. What is only known later
(1 / ||C||, 1 / count) are scalars on the whole gradient.

X [T, H], W [V, H]: logits = X W', dX = G W, dW = G' X, G being the logits' gradient, written over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stppo.ops.arguments import check
from megatron_stppo.ops.vocab_logprob import Shard, all_gather, local_statistics, merge_shards, write_gradient

CHUNK = 4096  # rows; fewer make the matrix products slower
FLOATS = (torch.float32, torch.bfloat16)
# (loss, record) of rows [first, last), from their logprob, entropy and sum p^2
ChunkLoss = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    chunk: int = CHUNK,
    bounds: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """vocab_logprob of the logits hidden [T, H] @ weight [V_local, H].T: (logprob, entropy, sum_p_sq) [T].

    hidden, weight: float32 or bfloat16 alike. The rows are cut every `chunk`, or at `bounds` as in
    linear_loss. Extra memory: a chunk of logits, and in the backward a float32 gradient of the weight.
    hidden's gradient is this rank's part: sum it over `group`. Rows whose cotangents are 0 are left out of
    the backward. Everything else is vocab_logprob's.
    Raises ValueError naming the argument that does not fit.
    """
    shard = _shard(hidden, weight, target, vocab_start, vocab_size, temperature, ignore_index)
    chunks = _even_chunks(len(hidden), chunk) if bounds is None else list(itertools.pairwise(bounds))
    _check_chunks(chunks, len(hidden))
    out: tuple[Tensor, Tensor, Tensor] = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, shard, group, chunks
    )
    return out


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        shard: Shard,
        group: dist.ProcessGroup | None,
        chunks: Sequence[tuple[int, int]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = [local_statistics(hidden[a:b] @ weight.t(), shard.rows(slice(a, b))) for a, b in chunks]
        merged = merge_shards(all_gather(torch.cat(parts, dim=1), group), shard)
        ctx.shard, ctx.chunk = shard, max(1, *(b - a for a, b in chunks))
        ctx.save_for_backward(hidden, weight, merged)
        ctx.set_materialize_grads(False)
        logprob, entropy, sum_p_sq = merged[:3].clone().unbind()
        return logprob, entropy, sum_p_sq

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, merged = ctx.saved_tensors
        gradient = _Gradient(hidden, weight, ctx.chunk)
        live = _live_rows(cotangents)
        count = len(hidden) if live is None else len(live)
        for a, b in _even_chunks(count, ctx.chunk):
            rows = slice(a, b) if live is None else live[a:b]
            shard, statistics = ctx.shard.rows(rows), merged[:, rows].contiguous()
            logits = hidden[rows] @ weight.t()
            given = [None if x is None else x[rows] for x in cotangents]
            gradient.add(write_gradient(logits, shard, statistics, given, logits), rows)
            del logits  # before the next chunk's are made
        return gradient.of_hidden, gradient.of_weight.to(weight.dtype), None, None, None


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bounds: Sequence[int],
    loss: ChunkLoss,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """(sum of the chunks' losses, sum of their records) for rows [bounds[i], bounds[i+1]).

    `loss` is called once per chunk, with tensors of that chunk's rows, and must not need any other chunk: cut
    where whole segments end (chunk_bounds). Its scalar carries its global denominator; the record has no
    gradient.
    The gradient is computed in the forward; a backward before the next forward only scales it. A weight with
    a main_grad (megatron's float32 buffer) gets its gradient there, and none from autograd. Until then it
    stands in float32 memory of its own, 4 bytes per weight: the backward's factor is not known before.
    Other arguments and errors: linear_logprob.
    """
    shard = _shard(hidden, weight, target, vocab_start, vocab_size, temperature, ignore_index)
    chunks = list(itertools.pairwise(bounds))
    _check_chunks(chunks, len(hidden))
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    out: tuple[Tensor, Tensor] = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, shard, group, chunks, loss, wanted
    )
    return out


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        shard: Shard,
        group: dist.ProcessGroup | None,
        chunks: Sequence[tuple[int, int]],
        loss: ChunkLoss,
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        longest = max((b - a for a, b in chunks), default=0)
        gradient = _Gradient(hidden, weight, longest) if wanted else None
        losses, records = [], []
        for a, b in chunks:
            rows, part = slice(a, b), shard.rows(slice(a, b))
            logits = hidden[rows] @ weight.t()
            merged = merge_shards(all_gather(local_statistics(logits, part), group), part)
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in merged[:3]]
                value, record = loss(*leaves, a, b)
            losses.append(value.detach())
            records.append(record)
            if gradient is not None:
                cotangents = torch.autograd.grad(value, leaves, allow_unused=True)
                live = _live_rows(cotangents)
                if live is not None:  # failed trajectories, and without entropy clipped turns too
                    logits, part, merged = _kept(logits, live), part.rows(live), merged[:, live].contiguous()
                    cotangents, rows = [None if x is None else x[live] for x in cotangents], a + live
                gradient.add(write_gradient(logits, part, merged, cotangents, logits), rows)
            del logits  # before the next chunk's are made
        ctx.gradient, ctx.weight = gradient, weight
        total, record = torch.stack(losses).sum(0), torch.stack(records).sum(0)
        ctx.mark_non_differentiable(record)
        return total, record

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradient: _Gradient | None = ctx.gradient
        if gradient is None:
            raise RuntimeError(
                "linear_loss: the first backward scaled the gradient in place; there is no second"
            )
        ctx.gradient = None
        of_hidden, of_weight = gradient.of_hidden.mul_(cotangent), gradient.of_weight.mul_(cotangent)
        main = getattr(ctx.weight, "main_grad", None)
        if main is None:
            return of_hidden, of_weight.to(ctx.weight.dtype), *(None,) * 5
        main.add_(of_weight)  # float32, never rounded to the weight's type
        return of_hidden, None, *(None,) * 5


class _Gradient:
    """dX, and dW in float32, of some chunks of at most `longest` rows."""

    def __init__(self, hidden: Tensor, weight: Tensor, longest: int) -> None:
        self._hidden, self._weight = hidden, weight
        self._spare = longest * len(weight) * weight.itemsize // 10  # bytes: a tenth of a chunk of logits
        self.of_hidden = torch.zeros_like(hidden)
        self.of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def add(self, of_logits: Tensor, rows: slice | Tensor) -> None:
        """of_logits [rows, V_local]: the gradient of these rows' logits."""
        if not len(of_logits):
            return
        self.of_hidden[rows] = of_logits @ self._weight
        hidden = self._hidden[rows]
        if hidden.dtype == torch.float32:
            self.of_weight.addmm_(of_logits.t(), hidden)
            return
        # a product in float32, and on a CPU its factors too, in pieces that are a tenth of a chunk
        width = hidden.shape[1] + (0 if hidden.is_cuda else len(hidden))
        block = max(64, self._spare // (4 * max(1, width)))
        for start in range(0, of_logits.shape[1], block):
            columns = slice(start, start + block)
            self.of_weight[columns] += _product(of_logits[:, columns].t(), hidden)


def _kept(logits: Tensor, rows: Tensor) -> Tensor:
    """logits[rows] for ascending rows, moved to the front of the same memory, a sixteenth at a time."""
    step = max(1, len(logits) // 16)
    for start in range(0, len(rows), step):  # row i comes from i or behind it, which is not written yet
        chosen = rows[start : start + step]
        logits[start : start + len(chosen)] = logits[chosen]
    return logits[: len(rows)]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bfloat16, accumulated and returned in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def chunk_bounds(offsets: Tensor | None, rows: int, chunk: int = CHUNK) -> list[int]:
    """Where to cut rows into chunks of at most `chunk`, no segment [offsets[i], offsets[i+1]) being cut.

    offsets None: every row is a segment. A longer segment makes a longer chunk. Reads the offsets back.
    Example: offsets [0, 3, 5, 9] and chunk 5 give [0, 5, 9].
    """
    if offsets is None:
        return [*range(0, max(rows, 1), chunk), rows]
    if rows <= chunk:
        return [0, rows]
    bounds, previous = [0], 0
    for end in offsets.tolist():
        if end - bounds[-1] > chunk and previous > bounds[-1]:
            bounds.append(previous)
        previous = end
    return [*bounds, rows]


def _even_chunks(rows: int, chunk: int) -> list[tuple[int, int]]:
    if chunk < 1:
        raise ValueError(f"chunk={chunk} rows hold nothing; choose 1 or more, 4096 for speed")
    return [(a, min(a + chunk, rows)) for a in range(0, max(rows, 1), chunk)]


def _check_chunks(chunks: Sequence[tuple[int, int]], rows: int) -> None:
    if not chunks or chunks[0][0] != 0 or chunks[-1][1] != rows or any(a > b for a, b in chunks):
        raise ValueError(f"bounds of the chunks {chunks[:4]}.. must rise from 0 to the {rows} rows of hidden")


def _live_rows(cotangents: Sequence[Tensor | None]) -> Tensor | None:
    """Rows with a cotangent that is not 0, if that leaves many out. The host waits for their number."""
    given = [x != 0 for x in cotangents if x is not None]
    if not given:
        return None
    live = torch.nonzero(torch.stack(given).any(0)).squeeze(1)
    return live if len(live) < 0.9 * len(given[0]) else None


def _shard(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int | None,
    temperature: float | Tensor,
    ignore_index: int,
) -> Shard:
    check("hidden", hidden, hidden.device, FLOATS, (None, None))
    check("weight", weight, hidden.device, (hidden.dtype,), (None, hidden.shape[1]))
    check("target", target, hidden.device, (torch.int64,), (len(hidden),))
    return Shard.of(target, len(weight), vocab_start, vocab_size, temperature, ignore_index)
