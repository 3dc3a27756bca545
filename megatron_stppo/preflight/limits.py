"""The limits of the cluster check: names, defaults and reasons as data, and how a user overrides them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_stppo.config import ConfigError
from megatron_stppo.messages import did_you_mean


@dataclass(frozen=True)
class Limit:
    """One limit. A name that begins with min_ is a lower bound, one that begins with max_ an upper bound.

    Example: Limit("max_skew", 1.0, "s", "difference of a node's clock from the median clock").
    """

    name: str
    default: float
    unit: str
    reason: str


LIMITS = (
    Limit("min_bandwidth_node", 200.0, "GB/s", "NVLink of an A100 gives about 230, of an H100 over 400"),
    Limit("min_bandwidth_pair", 40.0, "GB/s", "one adapter of 400 Gbit/s carries 50, TCP below 10"),
    Limit("min_bandwidth_all", 40.0, "GB/s", "as for a pair; a large fabric gives less than a pair"),
    Limit("min_compute", 0.9, "x median", "GPUs of one kind differ by a few percent"),
    Limit("min_clock", 0.6, "x maximum", "a power limit alone leaves at least 0.7 in a matrix product"),
    Limit("max_memory_used", 2.0, "GiB", "CUDA's own context takes less than 1"),
    Limit("max_uncorrected_errors", 0, "errors", "memory errors since the driver was loaded"),
    Limit("max_retired_pages", 60, "pages", "GPUs before Ampere only; later ones remap rows"),
    Limit("min_write", 0.5, "GB/s", "actor and critic of 7B: 14 bytes per parameter, 210 GB per checkpoint"),
    Limit("min_read", 0.5, "GB/s", "the same, to resume"),
    Limit("min_free_space", 700.0, "GB", "three checkpoints of such a run, and records"),
    Limit("max_visible", 10.0, "s", "until a node sees the files of all other nodes"),
    Limit(
        "max_skew",
        1.0,
        "s",
        "difference of a node's clock from the median clock; locks of run folders expire by the clock",
    ),
    Limit("min_open_files", 4096, "files", "hard limit; or 4 per rank of the job + 1024, if that is more"),
    Limit("min_shared_memory", 2.0, "GiB", "/dev/shm; Docker's default, 0.06, is too small for NCCL"),
)
DEFAULTS = {limit.name: limit.default for limit in LIMITS}
UNITS = {limit.name: limit.unit for limit in LIMITS}


def read(overrides: Iterable[str]) -> dict[str, float]:
    """Return all limits, with those of `overrides` ("NAME=VALUE") in place of the defaults.

    Raises ConfigError for an unknown name or a value that is not a finite number.
    """
    found = dict(DEFAULTS)
    for override in overrides:
        name, _, text = override.partition("=")
        if name not in DEFAULTS:
            hint = did_you_mean(name, DEFAULTS) or f"choose one of {', '.join(DEFAULTS)}"
            raise ConfigError(f"--limit {override}: no such limit; {hint}")
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = math.nan
        if not math.isfinite(found[name]):
            raise ConfigError(f"--limit {override}: is not a number; write {name}={DEFAULTS[name]:g}")
    return found
