"""The limits of the cluster check, as data: default, reason, and the row that a limit decides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_stppo.base.printing import did_you_mean
from megatron_stppo.config import ConfigError

EXCLUDE = "exclude the node (sbatch --exclude) and report it to the administrators"
TCP = "look for NET/Socket with NCCL_DEBUG=INFO; set NCCL_IB_HCA, NCCL_SOCKET_IFNAME"
SLOW_FOLDER = "write checkpoints to a faster file system (run.root)"
NODE, PAIR, ALL = "min_bandwidth_node", "min_bandwidth_pair", "min_bandwidth_all"
SWAPS = {NODE: "min_all_to_all_node", PAIR: "min_all_to_all_pair", ALL: "min_all_to_all_all"}
HOPPER = 9  # major number of its compute capability
NETWORK, GENERATION = "GB/s of the adapters", "generation"  # measured, without a limit


@dataclass(frozen=True)
class Limit:
    """One limit. A name that begins with min_ is a lower bound, one that begins with max_ an upper bound.

    Example: Limit("min_compute", 0.9, "x median", "GPUs differ by a few percent", "matrix product", "..").
    """

    name: str
    default: float | str  # a text: of what `derived` computes it
    unit: str
    reason: str
    row: str  # name of the row
    remedy: str


LIMITS = (
    Limit(NODE, "320 on Hopper, else 200", "GB/s", "a choice below what NVLink should give; not measured",
          "all-reduce within a node", f"nvidia-smi nvlink --status; {EXCLUDE}"),
    Limit(PAIR, "0.7 of a node's adapters, at most 35 per GPU; without any, 250 on Hopper, else 40", "GB/s",
          "eight adapters of 400 Gbit/s carry 400, TCP below 10",
          "all-reduce of two nodes", f"{TCP}; if one node is in all slow pairs, {EXCLUDE}"),
    Limit(ALL, "0.7 of the value for a pair", "GB/s", "a large fabric gives less than a pair",
          "all-reduce of all nodes", "if all pairs pass, links between switches are slow"),
    *(Limit(SWAPS[name], "half of the all-reduce's", "GB/s", "reshard and experts use it", row,
            "as for the all-reduce")
      for name, row in ((NODE, "all-to-all within a node"), (PAIR, "all-to-all of two nodes"),
                        (ALL, "all-to-all of all nodes"))),
    Limit("min_compute", 0.9, "x median", "GPUs of one kind differ by a few percent",
          "matrix product", EXCLUDE),
    Limit("max_memory_used", 2.0, "GiB", "CUDA's own context takes less than 1", "GPU memory in use",
          "end the processes that an earlier job left on the node, or exclude the node"),
    Limit("max_uncorrected_errors", 0, "errors", "memory errors since the driver was loaded",
          "uncorrected memory errors", f"the GPU must be reset or replaced; {EXCLUDE}"),
    Limit("min_write", 0.5, "GB/s", "actor and critic of 7B: 14 bytes per parameter, 210 GB per checkpoint",
          "write to the run folder", SLOW_FOLDER),
    Limit("min_read", 0.5, "GB/s", "the same, to resume", "read from the run folder", SLOW_FOLDER),
    Limit("min_free_space", 700.0, "GB", "three checkpoints of such a run, and records",
          "free space in the run folder",
          "remove old runs, keep fewer checkpoints, or set run.root to another file system"),
    Limit("max_visible", 10.0, "s", "until a node sees the files of all other nodes", "run folder is shared",
          "set run.root to a file system that all nodes share; in an image, mount it (MOUNTS)"),
    Limit("min_open_files", 4096, "files", "hard limit; or 4 per rank of the job + 1024, if that is more",
          "limit on open files",
          "raise the hard limit: LimitNOFILE of slurmd.service, or /etc/security/limits.conf"),
    Limit("min_shared_memory", 2.0, "GiB", "/dev/shm; Docker's default, 0.06, is too small for NCCL",
          "size of /dev/shm", "mount a larger tmpfs; with Docker --ipc=host or --shm-size"),
)  # fmt: skip
NAMES = [limit.name for limit in LIMITS]
DEFAULTS = {limit.name: limit.default for limit in LIMITS if not isinstance(limit.default, str)}


def derived(numbers: Sequence[tuple[str, str, float]]) -> dict[str, float]:
    """Return the limits of bandwidths in GB/s, by what was measured: (name, of whom, value).

    A node whose adapters are not all active is compared with the best node.
    """
    hopper = any(name == GENERATION and value >= HOPPER for name, _, value in numbers)
    adapters = max((value for name, _, value in numbers if name == NETWORK), default=0.0)
    node, pair = (320.0, 250.0) if hopper else (200.0, 40.0)
    reduced = {NODE: node, PAIR: 0.7 * adapters or pair}
    reduced[ALL] = 0.7 * reduced[PAIR]
    return reduced | {swap: reduced[name] / 2 for name, swap in SWAPS.items()}


def read(overrides: Iterable[str]) -> dict[str, float]:
    """Return the limits, with those of `overrides` ("NAME=VALUE"), and without those that are derived.

    Raises ConfigError for an unknown name or a value that is not a finite number.
    """
    limits = dict(DEFAULTS)
    for override in overrides:
        name, _, text = override.partition("=")
        if name not in NAMES:
            hint = did_you_mean(name, NAMES) or f"choose one of {', '.join(NAMES)}"
            raise ConfigError(f"--limit {override}: no such limit; {hint}")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = math.nan
        if not math.isfinite(limits[name]):
            raise ConfigError(
                f"--limit {override}: is not a number; write {name}={DEFAULTS.get(name, 300):g}"
            )
    return limits
