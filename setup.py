"""Builds csrc/ into megatron_stppo/_csrc: the CPU part always, the CUDA part where nvcc is found.

Neither includes torch, so one build serves any torch, and a machine without a GPU compiles every kernel.

    STPPO_CUDA_ARCHS   architectures for nvcc, such as "80;90a" (default: 90a); "" leaves the CUDA part out
    CUDA_HOME          where to look for nvcc before PATH
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

CSRC = Path("csrc")
HEADERS = sorted(map(str, CSRC.glob("*.h"))) + sorted(map(str, CSRC.glob("*.cuh")))
# No -ffast-math: NaN and infinity mean something here. What vectorising needs beyond -O3 is named.
# No peeling up to an aligned address: the order of a sum would depend on where its row starts.
VECTORISE = ["-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
if platform.machine() == "x86_64":
    # 512-bit vectors slow down everything that runs after them on the core (docs/performance.md).
    VECTORISE += ["-mprefer-vector-width=256"]
VECTORISE += ["--param", "vect-max-peeling-for-alignment=0"]
CXX_FLAGS = ["-O3", *VECTORISE, "-Wall", "-Wextra"]
NVCC_FLAGS = ["-O3", "-std=c++20", "-Xcompiler", "-fPIC", "--expt-relaxed-constexpr", "-lineinfo"]


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin/nvcc").is_file():
        return str(Path(home) / "bin/nvcc")
    return shutil.which("nvcc")


def gencode(archs: str) -> list[str]:
    """nvcc's flags for "80;90a"."""
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs.split(";")]


def libraries(compiler: str) -> Path:
    """Where nvcc's toolkit keeps libcudart_static.a; nvcc itself may be a wrapper elsewhere."""
    line = [compiler, "--dryrun", "-x", "cu", os.devnull, "-o", os.devnull]
    said = subprocess.run(line, capture_output=True, text=True).stderr
    top = next((x.split("TOP=")[1] for x in said.splitlines() if "TOP=" in x), "nvcc's toolkit")
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (Path(top) / folder / "libcudart_static.a").is_file():
            return Path(top) / folder
    raise SystemExit(
        f"{top} holds no libcudart_static.a; install the CUDA runtime's static library, or set "
        "STPPO_CUDA_ARCHS= to build without CUDA"
    )


class Build(build_ext):
    """setuptools compiles the C++ files; nvcc the .cu files, which are linked as objects."""

    def build_extension(self, extension: Pybind11Extension) -> None:
        self.force = True  # what is linked depends on nvcc and the architectures too, which have no date
        archs = os.environ.get("STPPO_CUDA_ARCHS", "90a")
        compiler = nvcc() if archs else None
        if compiler is not None:
            scratch = Path(self.build_temp) / "cuda"
            scratch.mkdir(parents=True, exist_ok=True)
            runs = []
            for source in sorted(CSRC.glob("*.cu")):
                target = str(scratch / f"{source.stem}.o")
                line = [compiler, *NVCC_FLAGS, *gencode(archs), "-c", str(source), "-o", target]
                runs.append(subprocess.Popen(line))
                extension.extra_objects.append(target)
            if any([run.wait() for run in runs]):
                raise SystemExit("nvcc failed; see above, or set STPPO_CUDA_ARCHS= to build without CUDA")
            extension.define_macros.append(("STPPO_CUDA", f'"{archs}"'))
            extension.library_dirs.append(str(libraries(compiler)))
            extension.libraries += ["cudart_static", "rt", "dl", "pthread"]
        super().build_extension(extension)


extension = Pybind11Extension(
    "megatron_stppo._csrc",
    sorted(map(str, CSRC.glob("*.cpp"))),
    depends=[*HEADERS, *map(str, CSRC.glob("*.cu"))],
    cxx_std=20,
    extra_compile_args=CXX_FLAGS,
    extra_link_args=["-fopenmp"],
)
setup(ext_modules=[extension], cmdclass={"build_ext": Build})
