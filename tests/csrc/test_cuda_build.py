"""Every .cu compiles and links for every architecture, within limits on registers and spills.

Needs nvcc, no GPU. Registers per kernel: `pytest tests/csrc/test_cuda_build.py -rP`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.csrc.throwaway import CSRC

ARCHITECTURES = ("80", "89", "90a", "100")
SOURCES = sorted(path.stem for path in CSRC.glob("*.cu"))
FLAGS = ["-O3", "-std=c++20", "-Xcompiler", "-fPIC", "--expt-relaxed-constexpr", "-lineinfo"]  # setup.py's
# kernels that move a row of logits 16 bytes at a time: (name, logits, values in a pack) -> how
WIDE = {
    ("statistics_kernel", "f", 4): ["ld"],
    ("statistics_kernel", "13__nv_bfloat16", 8): ["ld"],
    ("gradient_kernel", "f", 4): ["ld", "st"],
    ("gradient_kernel", "13__nv_bfloat16", 8): ["ld", "st"],
}


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin/nvcc").is_file():
        return str(Path(home) / "bin/nvcc")
    return shutil.which("nvcc")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """{op: (object for all architectures, what ptxas said)}; two compilers at a time."""
    compiler = nvcc()
    if compiler is None and os.environ.get("CI"):
        pytest.fail("continuous integration compiles the CUDA kernels: put nvcc on PATH")
    if compiler is None:
        pytest.skip("nvcc is not on PATH and CUDA_HOME does not name it")
    folder = tmp_path_factory.mktemp("cuda")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]

    def compiled(op: str) -> tuple[Path, str]:
        out = folder / f"{op}.o"
        line = [compiler, *FLAGS, *targets, "-Xptxas", "-v", "-c", str(CSRC / f"{op}.cu"), "-o", str(out)]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return out, done.stderr

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SOURCES, pool.map(compiled, SOURCES), strict=True))


def reports(said: str, arch: str) -> dict[str, tuple[int, int]]:
    """{kernel's mangled name: (registers, bytes spilled)} of one architecture."""
    entry = re.compile(
        rf"Compiling entry function '(\w+)' for 'sm_{arch}'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    return {name: (int(used), int(out) + int(back)) for name, out, back, used in entry.findall(said)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", SOURCES)
def test_every_kernel_compiles_and_spills_few_registers(op, arch, built):
    kernels = reports(built[op][1], arch)
    assert kernels, f"{op}.cu has no kernel for sm_{arch}"
    for name, (registers, spilled) in kernels.items():
        print(f"sm_{arch} {op}: {name}: {registers} registers, {spilled} bytes spilled")
        assert spilled <= (8 if arch == "100" else 0), name  # the statistics in bfloat16 on sm_100
        # 256 threads of a block need two blocks on a multiprocessor to hide the latency of memory
        assert registers <= 128, name


def test_objects_for_all_architectures_link_without_a_driver(built, tmp_path):
    objects = [str(made) for made, _ in built.values()]
    line = [nvcc(), "-shared", "-Xlinker", "--no-undefined", *objects, "-o", str(tmp_path / "all.so")]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    needs = subprocess.run(["ldd", str(tmp_path / "all.so")], capture_output=True, text=True).stdout
    assert "libcuda" not in needs and "not found" not in needs, (
        "the runtime is linked statically, as in setup.py"
    )


@pytest.mark.parametrize(("kernel", "logits", "values"), WIDE)
def test_rows_of_logits_move_16_bytes_at_a_time(kernel, logits, values, built, tmp_path):
    """Checked in PTX: the assembler turns four-word accesses into LDG.E.128 and STG.E.128."""
    source, out = CSRC / "vocab_logprob.cu", tmp_path / "vocab_logprob.ptx"
    line = [nvcc(), *FLAGS[:2], *FLAGS[4:], "-ptx", "-arch=compute_90a", str(source), "-o", str(out)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = re.split(r"\.entry ", out.read_text())
    mine = [x for x in kernels if re.match(rf"\w+{kernel}I{logits}Li{values}E", x)]
    assert len(mine) == 1, f"{kernel}<{logits}, {values}> is not in the PTX"
    for access in WIDE[kernel, logits, values]:
        assert re.search(rf"{access}\.global\S*\.v4\.[ubf]32", mine[0]), f"{kernel} has no 16-byte {access}"
