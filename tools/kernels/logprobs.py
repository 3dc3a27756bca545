"""Sections of benchmark_kernels about log-probabilities, from logits and from hidden states."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo import ops
from tools.kernels.measure import Bench, Row, Variant, implementation

REFERENCE_ROWS = 64  # rows of logits; a float64 reference of all rows would take longer than the benchmark
IGNORED = -100
# what training calls: the weight's gradient needs no memory of its own
INTO_MAIN = "linear_loss into main_grad"


class Produced(torch.autograd.Function):
    """Logits that are not a leaf, like those of a model: autograd keeps and may clone a leaf's gradient."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None


def alone(bench: Bench, columns: int) -> str:
    """Return a label for cases on a GPU with few columns, which are one rank's part of a large vocabulary."""
    return " (local shard, no collective)" if bench.device == "cuda" and columns < 2**15 else ""


def vocab_rows(
    bench: Bench,
    cases: Sequence[tuple[int, int, torch.dtype]],
    passes: Sequence[str],
    missing: str,
    cold: bool,
) -> Iterator[list[Row]]:
    """Yield the rows of vocab_logprob.

    `cases` are (rows, columns, dtype) of the logits. `missing` is the reason why torch.compile is not
    measured. The backward pass overwrites the logits if it can, so they are restored before every call.
    """
    leaf = torch.ones((), device=bench.device, requires_grad=True)
    for rows, columns, dtype in cases:
        logits = (3 * torch.randn(rows, columns, device=bench.device)).to(dtype)
        target = torch.randint(0, columns, (rows,), device=bench.device)
        cotangent = torch.randn(rows, device=bench.device)
        reference = exact_logprob(logits[:REFERENCE_ROWS], target, cotangent)
        work, size = torch.empty_like(logits), logits.numel() * logits.element_size()
        kind = str(dtype).removeprefix("torch.") + alone(bench, columns)
        section = f"vocab_logprob [{rows:,}, {columns:,}] {kind}"

        def fresh(work: Tensor = work, logits: Tensor = logits) -> Tensor:
            produced: Tensor = Produced.apply(leaf, work.copy_(logits))
            return produced

        functions: dict[str, Any] = {
            "fused": fused_vocab("extension"),
            "fallback": fused_vocab("torch"),
            "log_softmax + gather": gather_logprob,
        }
        if dtype != torch.float32:
            functions["in float32"] = gather_logprob_float32
        functions["in float32, with entropy"] = gather_logprob_entropy
        functions["torch.compile"] = missing or torch.compile(gather_logprob_float32, dynamic=False)
        functions["megatron-core"] = megatron_logprob(bench.device)
        for name in passes:
            variants = [
                vocab_variant(label, function, name, fresh, target, cotangent, reference)
                for label, function in functions.items()
            ]
            moved = size * {"forward": 1, "backward": 2, "forward + backward": 3}[name]
            yield bench.rows(section, name, rows, moved, variants, cold)


def fused_vocab(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    def logprob(logits: Tensor, target: Tensor) -> Tensor:
        with implementation(mode):
            return ops.vocab_logprob(logits, target, overwrite=True)[0]

    return logprob


def vocab_variant(
    label: str,
    function: Callable[[Tensor, Tensor], Tensor] | str,
    name: str,
    fresh: Callable[[], Tensor],
    target: Tensor,
    cotangent: Tensor,
    reference: tuple[Tensor, Tensor],
) -> Variant:
    if isinstance(function, str):
        return Variant(label, missing=function)
    mode = "torch" if label == "fallback" else "extension"  # of the backward pass

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, function(x, target)

    def backward(state: tuple[Tensor, Tensor]) -> Tensor:
        x, logprob = state
        with implementation(mode):
            return torch.autograd.grad(logprob, x, cotangent.to(logprob.dtype))[0]

    def both(x: Tensor) -> Sequence[Tensor]:
        state = forward(x)
        return state[1].detach(), backward(state)

    ours = label in ("fused", "fallback")
    if name == "forward":
        return Variant(label, lambda x: forward(x)[1:], fresh, reference[:1], ours=ours)
    if name == "backward":
        return Variant(
            label, lambda s: (backward(s),), lambda: forward(fresh()), reference=reference[1:], ours=ours
        )
    return Variant(label, both, fresh, reference, ours=ours)


def exact_logprob(logits: Tensor, target: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    x = logits.double().requires_grad_()
    logprob = gather_logprob(x, target[: len(x)])
    return logprob.detach(), torch.autograd.grad(logprob, x, cotangent[: len(x)].double())[0]


def linear_rows(
    bench: Bench, cases: Sequence[tuple[int, int, int, torch.dtype]], valid: Sequence[float], cold: bool
) -> Iterator[list[Row]]:
    """Yield the rows of linear_loss and of one GEMM X W' of the same size.

    Measured are forward and backward from hidden states. `cases` are (T, H, V, dtype).
    """
    for rows, width, columns, dtype in cases:
        hidden = torch.randn(rows, width, device=bench.device).to(dtype).requires_grad_()
        weight = torch.randn(columns, width, device=bench.device) * 2 / width**0.5
        weight = weight.to(dtype).requires_grad_()
        for part in valid:
            yield _linear_case(bench, hidden, weight, part, cold)


def _linear_case(bench: Bench, hidden: Tensor, weight: Tensor, part: float, cold: bool) -> list[Row]:
    (rows, width), columns = hidden.shape, len(weight)
    target = torch.randint(0, columns, (rows,), device=bench.device)
    dead = torch.rand(rows, device=bench.device) >= part
    ignoring = target.masked_fill(dead, IGNORED)
    cotangent = torch.randn(rows, device=bench.device).masked_fill(dead, 0)
    main = weight.detach().requires_grad_()
    main.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]

    def of_chunk(chunk: ops.Chunk) -> tuple[Tensor, Tensor]:
        loss = (cotangent[chunk.first : chunk.last] * chunk.logprob).sum()
        return loss, chunk.logprob.detach().sum()[None]

    def loss(_: None, into_main: bool = False, **settings: bool) -> Any:
        head, bounds = main if into_main else weight, ops.chunk_bounds(None, rows)
        with implementation("extension"):
            total, *_ = ops.linear_loss(hidden, head, ignoring, bounds, of_chunk, **settings)
            return torch.autograd.grad(total, hidden if into_main else (hidden, weight))

    def unfused(_: None) -> Any:
        logprob = gather_logprob_float32(hidden @ weight.t(), target)
        return torch.autograd.grad(logprob, (hidden, weight), cotangent)

    into_main = functools.partial(loss, into_main=True)
    reference = exact_linear(hidden, weight, target, cotangent)
    variants = [
        Variant("one GEMM", lambda _: (hidden.detach() @ weight.detach().t(),)),
        Variant("linear_loss", loss, reference=reference, ours=True),
        Variant(INTO_MAIN, into_main, reference=reference[:1], ours=True),
        Variant("logits, log_softmax + gather", unfused, reference=reference),
    ]
    if hidden.dtype == torch.bfloat16:  # what training calls with model.head_dtype=auto on a GPU
        wide = functools.partial(loss, float32_logits=True)
        variants.append(Variant("linear_loss, logits in float32", wide, reference=reference, ours=True))
    kind = str(hidden.dtype).removeprefix("torch.") + alone(bench, columns)
    section = f"linear_loss [{rows:,}, {width:,}] x {columns:,} {kind}"
    moved = hidden.element_size() * 3 * width * (rows + columns)
    found = bench.rows(section, f"valid {part:g}", rows, moved, variants, cold)
    unit = found[0].seconds(bench.device) or 1.0
    times = [(row.seconds(bench.device) or 0.0) / unit for row in found]
    return [replace(row, hidden=width, gemm_times=n) for row, n in zip(found, times, strict=True)]


def exact_linear(hidden: Tensor, weight: Tensor, target: Tensor, cotangent: Tensor) -> list[Tensor | None]:
    """Return [d/d hidden of the first rows, None], in float64. d/d weight is not compared."""
    x = hidden[:REFERENCE_ROWS].detach().double().requires_grad_()
    logprob = gather_logprob(x @ weight.detach().double().t(), target[: len(x)])
    return [torch.autograd.grad(logprob, x, cotangent[: len(x)].double())[0], None]


def gather_logprob(logits: Tensor, target_T: Tensor) -> Tensor:
    """Return log-probs by log_softmax in the logits' dtype, then gather."""
    return logits.log_softmax(-1).gather(1, target_T[:, None]).squeeze(1)


def gather_logprob_float32(logits: Tensor, target_T: Tensor) -> Tensor:
    """Return log-probs by log_softmax in float32, as trainers do for bfloat16 logits."""
    return gather_logprob(logits.float(), target_T)


def gather_logprob_entropy(logits: Tensor, target_T: Tensor) -> Tensor:
    """Return log-probs, and compute the entropy only for its cost, because our op returns it too."""
    log_p = logits.float().log_softmax(-1)
    with torch.no_grad():
        (log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, target_T[:, None]).squeeze(1)


@functools.cache
def megatron_logprob(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return megatron-core's vocab-parallel cross entropy over a process group of size 1."""
    with warnings.catch_warnings(action="ignore"):  # about Apex and TransformerEngine
        from megatron.core import parallel_state

    module = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()

    def logprob(logits: Tensor, target_T: Tensor) -> Tensor:
        return -module.vocab_parallel_cross_entropy(logits[:, None], target_T[:, None]).squeeze(1)

    return logprob
