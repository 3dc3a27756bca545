"""Measurements of benchmark_kernels: interleaved variants, their error against float64, and copy bandwidth.

There are two times for each variant, each a median with p10 and p90:
    warm: one call right after a call of the same variant, until the device has finished its work.
    cold: one call after the caches were overwritten. On a GPU this is the time on the device alone: the
    stream is kept busy while the host enqueues the call. If the host needs longer than that (thousands of
    launches, for example from a Python loop), it is the host's time.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.measuring import percentiles, synchronize

MOST_ROUNDS = 300
BUSY_CYCLES = 4_000_000  # about 2 ms on a GPU, longer than the host needs to enqueue a few hundred kernels


@dataclass(frozen=True)
class Variant:
    """One implementation of a computation. `prepare` runs before every call, untimed; `run` gets its result.

    `run` returns tensors in the order of `reference` (float64), where None means without comparison.
    Example: Variant("doubling", lambda _: (x * 2,), reference=(x.double() * 2,))
    """

    name: str
    run: Callable[[Any], Sequence[Tensor]] = lambda _: ()
    prepare: Callable[[], Any] = lambda: None
    reference: Sequence[Tensor | None] = ()
    missing: str = ""  # the reason why it cannot run here
    ours: bool = False  # our errors are raised; an opponent's error is the reason why it is missing


@dataclass(frozen=True)
class Row:
    """Results of one variant at one size. Times are [p10, median, p90] in seconds, None if it did not run."""

    section: str
    size: str
    variant: str
    tokens: int
    bytes: int  # the minimum memory traffic of this op and size
    warm: list[float] | None = None
    cold: list[float] | None = None
    error_abs: float | None = None  # the largest over outputs and gradients
    error_rel: float | None = None  # relative to the largest absolute value of the tensor
    peak_bytes: int | None = None  # GPU: allocated in addition to the inputs, with workspaces and outputs
    missing: str = ""
    hidden: int = 0  # of linear_loss: columns of X
    gemm_times: float | None = None  # of linear_loss: time / that of one product X W'

    def seconds(self, device: str, at: int = 1) -> float | None:
        """Return the time that is used for ratios: warm on a CPU, cold (time on the device) on a GPU.

        `at` is 0 for p10, which other processes disturb least, 1 for the median, 2 for p90.
        """
        times = self.cold if device == "cuda" else self.warm
        return times[at] if times else None


class Bench:
    """Measure on one device, with a budget in seconds per group of variants and a least number of rounds."""

    def __init__(self, device: str, budget: float, rounds: int, scratch_bytes: int) -> None:
        self.device, self.budget, self._rounds = device, budget, rounds
        self._source = torch.ones(scratch_bytes // 4, device=device)
        self._target = torch.zeros_like(self._source)
        self.copies: list[float] = []  # bytes/s

    def copy(self, times: int = 5) -> None:
        """Measure the bytes per second, read and written, by copy_ of a buffer larger than the caches."""
        for _ in range(times):
            seconds = self._once(Variant("copy", lambda _: (self._target.copy_(self._source),)), cold=False)
            self.copies.append(2 * self._source.numel() * 4 / seconds)

    @property
    def copy_bandwidth(self) -> float:
        return statistics.median(self.copies)

    def rows(
        self, section: str, size: str, tokens: int, moved: int, variants: Sequence[Variant], cold: bool = True
    ) -> list[Row]:
        """Return the rows of all variants. They are called in turn, so that disturbances affect all."""
        reasons, first = {}, dict[str, dict[str, Any]]()
        for variant in variants:
            reasons[variant.name] = variant.missing
            try:
                first[variant.name] = {} if variant.missing else self._first(variant)
            except Exception as error:  # an opponent that does not run here is left out, with the reason
                if variant.ours:
                    raise
                reasons[variant.name] = reason_of(error)
        able = [variant for variant in variants if not reasons[variant.name]]
        warm = self._interleaved(able, self.budget, cold=False)
        often = cold or self.device == "cuda"
        flushed = self._interleaved(able, self.budget / 2, cold=True) if often else {}
        return [
            Row(
                *(section, size, name, tokens, moved, warm.get(name), flushed.get(name)),
                missing=reason,
                **first.get(name, {}),
            )
            for name, reason in reasons.items()
        ]

    def _first(self, variant: Variant) -> dict[str, Any]:
        """Return the errors and the memory of one call. This call also compiles and warms up."""
        gpu = self.device == "cuda"
        if gpu:
            self._once(variant, cold=False)  # memory that the first call allocates permanently is not counted
        state, out = variant.prepare(), dict[str, Any]()
        synchronize()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        result = variant.run(state)
        synchronize()
        if gpu:
            out["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        out["error_abs"], out["error_rel"] = errors(result, variant.reference)
        return out

    def _interleaved(self, variants: Sequence[Variant], budget: float, cold: bool) -> dict[str, list[float]]:
        """Return the times of each variant.

        A variant that has used its share of the budget skips later rounds.
        """
        times: dict[str, list[float]] = {variant.name: [] for variant in variants}
        least = min(3, self._rounds) if cold else self._rounds
        used = dict.fromkeys(times, 0.0)
        for number in range(MOST_ROUNDS):
            for name, variant in ((variant.name, variant) for variant in variants):
                if number < least or used[name] < budget / len(variants):
                    start = time.perf_counter()
                    if not cold:
                        self._once(variant, cold)  # load its code and data into the caches
                    times[name].append(self._once(variant, cold))
                    used[name] += time.perf_counter() - start
        return {name: percentiles(values) for name, values in times.items()}

    def _once(self, variant: Variant, cold: bool) -> float:
        state = variant.prepare()
        if cold:
            self._target.zero_()
        if self.device == "cuda" and cold:
            return self._device_seconds(variant, state)
        synchronize()
        start = time.perf_counter()
        variant.run(state)
        synchronize()
        return time.perf_counter() - start

    def _device_seconds(self, variant: Variant, state: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        variant.run(state)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def reason_of(error: Exception) -> str:
    """Return the first line of an error, for the table."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:120]}"


def errors(result: Sequence[Tensor], reference: Sequence[Tensor | None]) -> tuple[float | None, float | None]:
    """Return (largest absolute error, largest error relative to the tensor's largest absolute value)."""
    pairs = [(a, b) for a, b in zip(result, reference, strict=False) if b is not None and b.numel()]
    differences = [
        float((a[: len(b)] if b.dim() else a).detach().double().sub(b).abs().max()) for a, b in pairs
    ]
    sizes = [max(float(b.abs().max()), 1e-300) for _, b in pairs]
    if not pairs:
        return None, None
    return max(differences), max(d / s for d, s in zip(differences, sizes, strict=True))


@contextlib.contextmanager
def implementation(mode: str) -> Iterator[None]:
    """Set STPPO_OPS in a block.

    `extension` raises an error instead of a fallback, `torch` is the fallback.
    """
    before = os.environ.get("STPPO_OPS")
    os.environ["STPPO_OPS"] = mode
    try:
        yield
    finally:
        os.environ.pop("STPPO_OPS") if before is None else os.environ.update(STPPO_OPS=before)


def scratch_bytes(device: str) -> int:
    """Return four times the size of the last-level cache, limited to 256 MiB .. 1 GiB."""
    if device == "cuda":
        cache = torch.cuda.get_device_properties(0).L2_cache_size
    else:
        file = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
        cache = (
            int(file.read_text(encoding="utf-8").strip().removesuffix("K")) * 1024
            if file.exists()
            else 64 << 20
        )
    return min(max(4 * cache, 256 << 20), 1 << 30)
