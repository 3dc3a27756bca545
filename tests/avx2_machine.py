"""Makes a Python process choose code as on a machine with AVX2 and without AVX-512, on any x86-64 machine.

`make test-avx2` lets Python import this file when it starts, in every process that has its environment
variables. torch, oneDNN and MKL read some of them. The rest is done here, when a module is imported:
- `torch.cpu` says that the processor has neither AVX-512 nor AMX, so vLLM takes its AVX2 build.
- vLLM's builds for AVX-512 end the process with SIGILL, as their first instruction would.
- `megatron_stppo._csrc` is the build for x86-64-v3 in .venv/avx2.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType

BUILD = next(Path(__file__).resolve().parents[1].glob(".venv/avx2/*/_csrc.*.so"), None)
AVX512 = ("vllm._C", "vllm._C_AVX512")
MISSING = (
    "_is_avx512_supported",
    "_is_avx512_bf16_supported",
    "_is_vnni_supported",
    "_is_amx_tile_supported",
    "_is_amx_fp16_supported",
)


class Avx2:
    """A finder of modules, asked before all others."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in AVX512:
            os.kill(os.getpid(), signal.SIGILL)
        if name == "megatron_stppo._csrc":
            return importlib.util.spec_from_file_location(name, BUILD)
        if name != "torch.cpu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        spec.loader = WithoutAvx512(spec.loader)
        return spec


class WithoutAvx512(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for name in MISSING:
            getattr(module, name)  # AttributeError: torch has renamed it
            setattr(module, name, lambda: False)


assert BUILD is not None, "no build for x86-64-v3; make test-avx2 makes one"
sys.meta_path.insert(0, Avx2)
