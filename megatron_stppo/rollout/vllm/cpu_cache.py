"""Check that a key-value cache on CPU holds one trajectory and fits in memory.

Imports no vLLM and no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_stppo.config import ConfigError

GIB = 2**30
# files that hold the memory limit of a container (cgroup v2, v1)
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check(gib: float, max_context: int, bytes_per_token: int, ranks: int, memory: int) -> None:
    """Raise ConfigError if a cache of `gib` GiB per rank is too large or too small.

    It must fit in memory and hold one trajectory.
    `ranks` processes share this machine's `memory`, in bytes. A trajectory has up to `max_context` tokens.
    """
    least, most = max_context * bytes_per_token / GIB, memory / GIB / ranks
    if gib > most:
        raise ConfigError(
            f"rollout.kv_cache_gib={gib:g}: {ranks} ranks share {memory / GIB:.1f} GiB of memory, which "
            f"must also hold weights and optimizer; choose at most {most / 2:.2g}"
        )
    if gib < least:
        raise ConfigError(
            f"rollout.kv_cache_gib={gib:g}: one trajectory of {max_context} tokens takes {least:.2g} GiB; "
            "choose more, or lower rollout.max_context"
        )


def machine_memory() -> int:
    """Return the memory of this machine, or the limit of this container if it is lower, in bytes."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in LIMITS:
        path = Path(name)
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        found += [int(text)] if text.isdigit() else []
    return min(found)
