"""Log-probs from hidden states, with at most one chunk of logits in memory.

`linear_logprob` has no gradient. `linear_loss` is for a loss that is a sum over chunks, such as the loss of
ST-PPO over chunks of whole turns. It computes the gradient of a chunk's logits right after the logits, so it
takes 3 matrix products. Factors that are known only later (1 / ||C||) scale the whole gradient of a step.

With X [T, H] and W [V, H]: logits = X W', dX = G W, dW = G' X. G is the logits' gradient; it is written over
the logits.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stppo.ops.extension import check, is_one
from megatron_stppo.ops.products import add_product, product
from megatron_stppo.ops.shard import Shard, rows_of
from megatron_stppo.ops.vocab_logprob import all_gather, local_statistics, merge_shards, write_gradient

CHUNK = 4096  # rows; fewer make the matrix products slower
FLOATS = (torch.float32, torch.bfloat16)
PROMISED = "linear_loss: main_grad has the gradient for a cotangent of 1; multiply the chunks' losses instead"


@dataclass(frozen=True)
class Chunk:
    """The rows [first, last) of a `linear_loss`, and vocab_logprob of their logits, float32 [rows] each."""

    logprob: Tensor
    entropy: Tensor
    sum_p_sq: Tensor
    first: int
    last: int


ChunkLoss = Callable[[Chunk], tuple[Tensor, Tensor]]  # returns (loss, record)


@torch.no_grad()
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bounds: Sequence[int],
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    float32_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return vocab_logprob of the logits hidden @ weight.T, without a gradient: (logprob, entropy, sum_p_sq),
    [T] each.

    hidden: [T, H]. weight: [V_local, H]. Both are float32 or both are bfloat16.
    bounds: chunk i holds the rows [bounds[i], bounds[i+1]).
    float32_logits: with bfloat16 arguments, compute the logits in float32 and do not round them. A chunk of
    logits then takes twice the memory. Its gradient is rounded to bfloat16 for the two products.
    The other arguments are those of vocab_logprob. Extra memory: a chunk of logits.
    Raises ValueError that names the argument that does not fit.
    """
    shard = _shard(hidden, weight, target, vocab_start, vocab_size, temperature)
    multiply = product if float32_logits else torch.mm
    parts = [
        local_statistics(multiply(rows_of(hidden, rows), weight.t()), shard.rows(rows))
        for rows in _chunks(bounds, len(hidden))
    ]
    merged = merge_shards(all_gather(torch.cat(parts, dim=1), group), shard)
    logprob, entropy, sum_p_sq = merged.narrow(0, 0, 3).clone().unbind()
    return logprob, entropy, sum_p_sq


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
    float32_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum of the chunks' losses, sum of their records, log-probs of all rows).

    loss: called once per chunk, in order. It must not depend on other chunks, so cut between segments
    (chunk_bounds). The loss that it returns must already be divided by its global denominator.
    Only the loss carries a gradient. The log-probs are float32 [T].
    The other arguments and the errors are those of linear_logprob.
    The gradient of `hidden` is this rank's part: sum it over `group`. On a CPU the gradient leaves out rows
    whose cotangents are 0, if there are many (live_rows). Rows that are not left out must be finite: a NaN
    reaches the gradient of the weight.

    The gradient is computed in the forward, and the backward can run once.

    If the weight has a float32 `main_grad` (megatron's buffer), the forward adds its gradient there, and
    autograd gets none. The caller then promises one backward for each forward, before the next one of the
    same weight, with the cotangent 1: megatron's schedules, with losses that contain their denominators.
    RuntimeError if it does not; on a GPU another cotangent is an assertion of the device. A loss that is not
    to change main_grad must be computed under no_grad.

    Otherwise the backward scales the gradient by its cotangent, and the weight's gradient is held in extra
    float32 memory until then, 4 bytes per weight.
    """
    shard = _shard(hidden, weight, target, vocab_start, vocab_size, temperature)
    chunks = _chunks(bounds, len(hidden))
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    out: tuple[Tensor, Tensor, Tensor] = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, shard, group, chunks, loss, wanted, float32_logits
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
        chunks: Sequence[range],
        loss: ChunkLoss,
        wanted: bool,
        float32_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        longest = max(map(len, chunks))
        trained = wanted and ctx.needs_input_grad[1]
        main = _claimed(weight) if trained else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if trained and main is None else main
        gradient = Gradient(hidden, weight, longest, of_weight) if wanted else None
        multiply = product if float32_logits else torch.mm
        losses, records, logprobs = [], [], []
        for chunk in chunks:
            rows: range | Tensor = chunk
            part = shard.rows(chunk)
            logits = multiply(rows_of(hidden, chunk), weight.t())
            merged = merge_shards(all_gather(local_statistics(logits, part), group), part)
            with torch.set_grad_enabled(wanted):
                leaves = [x.detach().requires_grad_(wanted) for x in merged.unbind()[:3]]
                logprob, entropy, sum_p_sq = leaves
                value, record = loss(Chunk(logprob, entropy, sum_p_sq, chunk.start, chunk.stop))
            losses.append(value.detach())
            records.append(record)
            logprobs.append(merged.select(0, 0))
            if gradient is not None:
                cotangents: Sequence[Tensor | None] = torch.autograd.grad(value, leaves, allow_unused=True)
                live = live_rows(cotangents)
                if live is not None:  # without failed trajectories; if no entropy term, without clipped turns
                    logits, part, merged = kept(logits, live), part.rows(live), merged[:, live].contiguous()
                    cotangents, rows = (
                        [None if x is None else x[live] for x in cotangents],
                        chunk.start + live,
                    )
                gradient.add(write_gradient(logits, part, merged, cotangents, logits), rows)
            del logits  # free them before the next chunk's are allocated
        ctx.gradient, ctx.claimed = gradient, None if main is None else weight
        total, record, logprob = torch.stack(losses).sum(0), torch.stack(records).sum(0), torch.cat(logprobs)
        ctx.mark_non_differentiable(record, logprob)
        ctx.set_materialize_grads(False)  # no zeros for the outputs without a gradient
        return total, record, logprob

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        gradient: Gradient | None = ctx.gradient
        if gradient is None:
            raise RuntimeError("linear_loss: the first backward took the gradient; run it once only")
        ctx.gradient = None
        of_hidden, of_weight = gradient.of_hidden, gradient.of_weight
        if ctx.claimed is not None:
            ctx.claimed.awaits_backward = False
            torch._assert_async(cotangent == 1, PROMISED)  # on a GPU the host does not wait
            return of_hidden, None, *(None,) * 6
        if not is_one(cotangent):
            of_hidden = of_hidden.mul_(cotangent)
            of_weight = None if of_weight is None else of_weight.mul_(cotangent)
        return of_hidden, None if of_weight is None else of_weight.to(of_hidden.dtype), *(None,) * 6


def _claimed(weight: Tensor) -> Tensor | None:
    """Return the weight's main_grad if it can take the gradient, and mark that a backward must follow.

    Raises RuntimeError if the main_grad has a gradient whose backward has not run.
    """
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None or main.dtype != torch.float32:
        return None
    if getattr(weight, "awaits_backward", False):
        raise RuntimeError(
            "linear_loss: main_grad already has the gradient of a loss whose backward has not run; run it "
            "before the next forward, or compute a loss without a backward under torch.no_grad()"
        )
    weight.awaits_backward = True  # type: ignore[attr-defined]
    return main


def chunk_bounds(offsets: Tensor | None, rows: int, chunk: int = CHUNK) -> list[int]:
    """Return the bounds of chunks of at most `chunk` rows that cut no segment [offsets[i], offsets[i+1]).

    offsets: None: every row is a segment. A segment longer than `chunk` makes a longer chunk. Reads the
    offsets back to the host.

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


def _chunks(bounds: Sequence[int], rows: int) -> list[range]:
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != rows or sorted(bounds) != list(bounds):
        raise ValueError(f"bounds={bounds[:4]}... must rise from 0 to the {rows} rows of hidden")
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def _shard(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int | None,
    temperature: float | Tensor,
) -> Shard:
    check("hidden", hidden, hidden.device, FLOATS, (None, None))
    check("weight", weight, hidden.device, (hidden.dtype,), (None, hidden.shape[1]))
    check("target", target, hidden.device, (torch.int64,), (len(hidden),))
    return Shard.of(target, len(weight), vocab_start, vocab_size, temperature)


class Gradient:
    """Accumulator of dX, and of dW in float32, over chunks of at most `longest` rows.

    of_weight: float32 in the weight's shape, to which dW is added; None for a frozen weight, which gets none.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, longest: int, of_weight: Tensor | None) -> None:
        self._hidden, self._weight = hidden, weight
        self._spare = longest * len(weight) * weight.itemsize // 10  # bytes: a tenth of a chunk of logits
        self.of_hidden, self.of_weight = torch.zeros_like(hidden), of_weight

    def add(self, of_logits: Tensor, rows: range | Tensor) -> None:
        """Add the contribution of these rows. of_logits: [rows, V_local], the gradient of their logits."""
        if not len(of_logits):
            return
        if of_logits.dtype != self._weight.dtype:
            of_logits = _rounded(of_logits, self._weight.dtype)
        hidden = rows_of(self._hidden, rows)
        if isinstance(rows, range):
            torch.mm(of_logits, self._weight, out=self.of_hidden[rows.start : rows.stop])
        else:
            self.of_hidden[rows] = of_logits @ self._weight
        if self.of_weight is not None:
            # on a CPU a piece of the bfloat16 gradient takes a tenth of a chunk in float32
            add_product(self.of_weight, of_logits.t(), hidden, self._spare)


def kept(logits: Tensor, rows: Tensor) -> Tensor:
    """Return logits[rows], moved to the front of the same memory. `rows` must be ascending.

    Rows are moved in blocks of a sixteenth of the logits, so the temporary copies are small.
    """
    step = max(1, len(logits) // 16)
    for start in range(0, len(rows), step):  # row i comes from a row >= i, not yet overwritten
        chosen = rows[start : start + step]
        logits[start : start + len(chosen)] = logits[chosen]
    return logits[: len(rows)]


def _rounded(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 gradient [rows, V_local] in bfloat16, written to the front of its own memory.

    Rows are rounded in blocks of a sixteenth. Only the first block overlaps its own target, so only this one
    needs a temporary copy.
    """
    rows, columns = gradient.shape
    out = gradient.view(dtype).flatten()[: rows * columns].view(rows, columns)
    step = max(1, rows // 16)
    for start in range(0, rows, step):  # the rounded rows take half the bytes of the rows before them
        block = gradient[start : start + step]
        out[start : start + step] = block.to(dtype) if start == 0 else block
    return out


def live_rows(cotangents: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows with a nonzero cotangent, or None if these are 90% of the rows or more.

    None is also returned if all cotangents are None, and on a GPU, where the host would wait for the number
    of rows in every chunk.
    """
    given = [x for x in cotangents if x is not None]
    if not given or given[0].is_cuda:
        return None
    live = torch.nonzero(torch.stack([x != 0 for x in given]).any(0)).squeeze(1)
    return live if len(live) < 0.9 * len(given[0]) else None
