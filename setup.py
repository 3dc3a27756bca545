"""Build csrc/ into megatron_stppo/_csrc: always the CPU kernels, and the CUDA kernels if nvcc is found.

Neither includes torch. So one build works with any version of torch, and every kernel compiles on a machine
without a GPU. Two environment variables change the build:

    STPPO_CUDA_ARCHS   architectures for nvcc, such as "80;90a" (default: 90a); "" builds no CUDA kernels
    CUDA_HOME          the CUDA toolkit; nvcc is searched for here first, then on PATH
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
# Not -ffast-math, because NaN and infinity have a meaning here; only what vectorising needs is set.
# No peeling up to an aligned address, because the order of a sum would depend on the address of its row.
VECTORISE = ["-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
if platform.machine() == "x86_64":
    # 512-bit vectors slow down the code that runs after them on the same core (docs/performance.md).
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
    """Return the flags of nvcc for architectures such as "80;90a"."""
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs.split(";")]


def libraries(compiler: str) -> Path:
    """Return the folder of libcudart_static.a in nvcc's toolkit.

    nvcc itself may be a wrapper elsewhere, so the toolkit's path is read from its dry run.
    """
    line = [compiler, "--dryrun", "-x", "cu", os.devnull, "-o", os.devnull]
    said = subprocess.run(line, capture_output=True, text=True, encoding="utf-8").stderr
    top = next((x.split("TOP=")[1] for x in said.splitlines() if "TOP=" in x), "nvcc's toolkit")
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (Path(top) / folder / "libcudart_static.a").is_file():
            return Path(top) / folder
    raise SystemExit(
        f"{top} holds no libcudart_static.a; install the CUDA runtime's static library, or set "
        "STPPO_CUDA_ARCHS= to build without CUDA"
    )


class Build(build_ext):
    """Compile the C++ files with setuptools, and the .cu files with nvcc into objects that are linked in."""

    def build_extension(self, extension: Pybind11Extension) -> None:
        # File times do not show a change of nvcc or of STPPO_CUDA_ARCHS.
        self.force = True
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
