"""Whether a key-value cache on CPU holds one trajectory and fits the machine's memory. No vLLM, no torch."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_stppo.config import ConfigError

GIB = 2**30
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def check(gib: float, max_context: int, bytes_per_token: int, ranks: int, memory: int) -> None:
    """`ranks` share this machine's `memory`, in bytes. Raises ConfigError."""
    least, most = max_context * bytes_per_token / GIB, memory / GIB / ranks
    if gib > most:
        raise ConfigError(
            f"rollout.kv_cache_gib={gib:g}: {ranks} ranks share {memory / GIB:.1f} GiB of memory, for "
            f"weights and optimizer too; choose at most {most / 2:.2g}"
        )
    if gib < least:
        raise ConfigError(
            f"rollout.kv_cache_gib={gib:g}: one trajectory of {max_context} tokens takes {least:.2g}; choose "
            "more, or lower rollout.max_context"
        )


def machine_memory() -> int:
    """Bytes that the processes of this machine, or of this container, may have."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in LIMITS:
        path = Path(name)
        text = path.read_text().strip() if path.is_file() else ""
        found += [int(text)] if text.isdigit() else []
    return min(found)
