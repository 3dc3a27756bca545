"""Builds csrc/ for tests only: for other instruction sets, or CUDA kernels for a CPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pybind11

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
EMULATOR = Path(__file__).parent / "emulator"
# setup.py's, for what changes results
VECTORISE = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-mprefer-vector-width=256"]
VECTORISE += ["--param", "vect-max-peeling-for-alignment=0"]
LAUNCH = re.compile(r"(\w+)<<<(\w+), (\w+), [^>]*?(?:<[^>]*>[^>]*)?>>>\((.*?)\);")


def for_instruction_set(march: str, name: str, folder: Path) -> ModuleType:
    """Compile the CPU ops for one instruction set instead of clones for several."""
    _build(name, _cpu_ops(march), [], folder)
    return load(name, folder)


def _cpu_ops(march: str) -> dict[Path, Sequence[str]]:
    flags = [*VECTORISE, "-DSTPPO_CLONES=", f"-march={march}"]
    return {path: flags for path in sorted(CSRC.glob("*_cpu.cpp"))}


def build_emulated_cuda(folder: Path) -> None:
    """Every .cu on the CPU, in place of the GPU: pass on_gpu=True with tensors in the CPU's memory.

    Use load("emulated", folder). Its CPU ops are those of for_instruction_set("x86-64-v3").
    """
    flags = ["-O2", f"-I{EMULATOR}", "-include", str(EMULATOR / "cuda_on_cpu.h"), "-Wno-unknown-pragmas"]
    sources: dict[Path, Sequence[str]] = {EMULATOR / "cuda_on_cpu.cpp": flags}
    for path in sorted(CSRC.glob("*.cu")):
        text, launches = LAUNCH.subn(r"emulator::launch(\2, \3, [&] { \1(\4); });", path.read_text())
        assert launches and "<<<" not in text, f"{path.name}: LAUNCH does not match one of the launches"
        plain = folder / f"{path.stem}_emulated.cpp"
        plain.write_text(text)
        sources[plain] = flags
    sources |= _cpu_ops("x86-64-v3")
    _build("emulated", sources, ['-DSTPPO_CUDA="emulated"'], folder)


def _build(name: str, sources: dict[Path, Sequence[str]], binding_flags: Sequence[str], folder: Path) -> None:
    """Run two compilers at a time. The namespace is renamed, so that one process can load several builds."""
    includes = [f"-I{CSRC}", f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
    every = ["g++", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w", f"-Dstppo={name}", *includes]
    jobs = {CSRC / "bindings.cpp": ["-O0", *binding_flags], **sources}

    def compiled(source: Path) -> str:
        target = folder / f"{source.stem}.{name}.o"
        _run([*every, *jobs[source], "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, jobs))
    library = _library(name, folder)
    library.parent.mkdir()
    _run(["g++", "-shared", "-fopenmp", *objects, "-o", str(library)])


def load(name: str, folder: Path) -> ModuleType:
    """Import the build `name` of this folder."""
    spec = importlib.util.spec_from_file_location(f"{name}._csrc", _library(name, folder))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _library(name: str, folder: Path) -> Path:
    return folder / name / f"_csrc{sysconfig.get_config_var('EXT_SUFFIX')}"


def _run(line: Sequence[str]) -> None:
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(line)}\n{done.stderr}"
