"""Replacements of a GPU for the checks: a driver library without a driver, and vLLM's platform of an H100.

Nothing here computes anything. Each replacement only lets the real code run as far as it can without a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

DRIVER = "libcuda.so.1"
STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY, which every function of the stub returns


def has_driver() -> bool:
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def write_stub(packages: Sequence[Path], folder: Path) -> int:
    """Compile folder/libcuda.so.1 with every function that the libraries in these folders take from it.

    Python loads an extension only if all of its functions exist. Return the number of functions.
    """
    names = set()
    for path in itertools.chain.from_iterable(one.rglob("*.so*") for one in packages):
        if path.is_file() and b"libcuda.so.1" in _dynamic(path, "-d"):
            symbols = _dynamic(path, "-Ws", "--dyn-syms").decode()
            names |= set(re.findall(r" UND (cu[A-Z]\w*)", symbols))
    source = folder / "stub.c"
    source.write_text(
        "".join(f"int {name}(void) {{ return {STUB_LIBRARY}; }}\n" for name in sorted(names)),
        encoding="utf-8",
    )
    line = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", str(source), "-o", str(folder / DRIVER)]
    subprocess.run(line, check=True)
    return len(names)


def _dynamic(path: Path, *arguments: str) -> bytes:
    return subprocess.run(["readelf", *arguments, str(path)], capture_output=True).stdout


def install_platform() -> None:
    """Make vLLM's platform that of an H100. Call it before any other import of vLLM."""
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H100(CudaPlatformBase):
        """vLLM's CUDA platform, with the answers that it would get from the driver."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            # the base class: NCCL's cannot be made without a GPU
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    vllm.platforms._current_platform = H100()
