"""What vLLM reads from the environment when it is imported, set in one place, before the import.

Free of vLLM on purpose: whoever imports vLLM first calls this before.
A value that the user has set is left alone, except the one without which the engine cannot run in process.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch

SHARED_MEMORY = Path("/dev/shm")
# vLLM names its CPU all-reduce buffers "...-cpushm"; a killed run leaves them behind, 100 MB and more a rank.
STALE_PATTERN = "*cpushm*"
# A file younger than this may belong to an engine that has created it but not mapped it yet.
STALE_AFTER_SECONDS = 60.0


def prepare_environment() -> None:
    """Sets vLLM's switches; on a CPU also removes the shared memory that dead runs left behind.

    - VLLM_ENABLE_V1_MULTIPROCESSING=0: in this process, where the reshard can reach the weights.
    - VLLM_CPU_OMP_THREADS_BIND=nobind: engine and trainer share cores; binding would pin both to one.
    - TORCHDYNAMO_DISABLE=1 (CPU only): compiling the sampler's helpers costs seconds, gains nothing.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Applies while vLLM is being imported, before it sets up its own logging at the same level.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        remove_stale_shared_memory()


def remove_stale_shared_memory(
    folder: Path = SHARED_MEMORY, older_than: float = STALE_AFTER_SECONDS
) -> list[Path]:
    """Deletes vLLM's shared-memory files that no living process maps; returns what was deleted."""
    now = time.time()
    old = [path for path in folder.glob(STALE_PATTERN) if now - _modified(path, now) >= older_than]
    mapped = _mapped_files(STALE_PATTERN.strip("*")) if old else set()
    stale = [path for path in old if str(path) not in mapped]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def _modified(path: Path, default: float) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another rank's clean-up was faster
        return default


def _mapped_files(part: str) -> set[str]:
    """Paths containing `part` that some process of this machine maps (of those we may look into)."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # the process ended, or belongs to another user, whose files we cannot delete anyway
            continue
        found.update(line.split(maxsplit=5)[5] for line in lines if part in line)
    return found
