"""Every .cu compiles and links for several architectures, within limits on registers and spills.

Needs nvcc, no GPU. Registers per kernel: `pytest tests/csrc/test_cuda_build.py -rP`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.csrc.throwaway import CSRC

ARCHITECTURES, MORE_ARCHITECTURES = ("80", "90a"), ("89", "100")  # in every run; only under make test-all
SOURCES = sorted(path.stem for path in CSRC.glob("*.cu"))
FLAGS = ["-O3", "-std=c++20", "-Xcompiler", "-fPIC", "--expt-relaxed-constexpr", "-lineinfo"]  # setup.py's
# kernels that move 16 bytes at a time: (op, start of the mangled kernel) -> how
WIDE = {
    ("vocab_logprob", "statistics_kernelIfLi4E"): ["ld"],
    ("vocab_logprob", "statistics_kernelI13__nv_bfloat16Li8E"): ["ld"],
    ("vocab_logprob", "gradient_kernelIfLi4E"): ["ld", "st"],
    ("vocab_logprob", "gradient_kernelI13__nv_bfloat16Li8E"): ["ld", "st"],
    ("clipped_surrogate", "segments_kernel"): ["ld"],
    ("clipped_surrogate", "tokens_kernel"): ["ld", "st"],  # every token is a segment
}


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin/nvcc").is_file():
        return str(Path(home) / "bin/nvcc")
    return shutil.which("nvcc")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Callable[[tuple[str, ...]], dict[str, tuple[Path, str]]]:
    """A function from architectures to {op: (object, what ptxas said)}; two compilers at a time."""
    compiler = nvcc()
    if compiler is None and os.environ.get("CI"):
        pytest.fail("continuous integration compiles the CUDA kernels: put nvcc on PATH")
    if compiler is None:
        pytest.skip("nvcc is not on PATH and CUDA_HOME does not name it")

    @functools.cache
    def build(architectures: tuple[str, ...]) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
        folder = tmp_path_factory.mktemp("cuda")
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]

        def compiled(op: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
            out = folder / f"{op}.o"
            line = [compiler, *FLAGS, *targets, "-Xptxas", "-v", "-c", str(CSRC / f"{op}.cu"), "-o", str(out)]
            line += ["--keep", "--keep-dir", str(folder)]  # the PTX, beside the object
            return out, subprocess.run(line, capture_output=True, text=True)

        with ThreadPoolExecutor(2) as pool:
            return dict(zip(SOURCES, pool.map(compiled, SOURCES), strict=True))

    def built(architectures: tuple[str, ...]) -> dict[str, tuple[Path, str]]:
        found = build(architectures)
        for _, done in found.values():
            assert done.returncode == 0, done.stderr
        return {op: (out, done.stderr) for op, (out, done) in found.items()}

    return built


def reports(said: str, arch: str) -> dict[str, tuple[int, int]]:
    """{kernel's mangled name: (registers, bytes spilled)} of one architecture."""
    entry = re.compile(
        rf"Compiling entry function '(\w+)' for 'sm_{arch}'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    return {name: (int(used), int(out) + int(back)) for name, out, back, used in entry.findall(said)}


@pytest.mark.parametrize(
    "arch", [*ARCHITECTURES, *(pytest.param(arch, marks=pytest.mark.long) for arch in MORE_ARCHITECTURES)]
)
@pytest.mark.parametrize("op", SOURCES)
def test_every_kernel_compiles_and_spills_few_registers(op, arch, built):
    together = ARCHITECTURES if arch in ARCHITECTURES else MORE_ARCHITECTURES
    kernels = reports(built(together)[op][1], arch)
    assert kernels, f"{op}.cu has no kernel for sm_{arch}"
    for name, (registers, spilled) in kernels.items():
        print(f"sm_{arch} {op}: {name}: {registers} registers, {spilled} bytes spilled")
        allowed_registers, allowed_spills = limits(op, name, arch)
        assert spilled <= allowed_spills, name
        assert registers <= allowed_registers, name


def limits(op: str, kernel: str, arch: str) -> tuple[int, int]:
    """(registers, bytes spilled) that a kernel may use.

    With 64 registers, 32 warps fit on a multiprocessor, which hides the latency of memory. For this
    segments_kernel stores 16 bytes and loads 16 on sm_89, which has not been measured.

    sm_100 has not been measured: two blocks of 256 threads fit.
    """
    if op == "clipped_surrogate" and arch != "100":
        return 64, 32 if "segments_kernel" in kernel and arch == "89" else 0
    return 128, 8 if arch == "100" else 0


def test_objects_for_several_architectures_link_without_a_driver(built, tmp_path):
    objects = [str(made) for made, _ in built(ARCHITECTURES).values()]
    line = [nvcc(), "-shared", "-Xlinker", "--no-undefined", *objects, "-o", str(tmp_path / "all.so")]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    needs = subprocess.run(["ldd", str(tmp_path / "all.so")], capture_output=True, text=True).stdout
    assert "libcuda" not in needs and "not found" not in needs, (
        "the runtime is linked statically, as in setup.py"
    )


@pytest.fixture(scope="module")
def ptx(built) -> Callable[[str], str]:
    """A function from an op to the PTX of its kernels, from which sm_90a was assembled."""
    objects = {op: made for op, (made, _) in built(ARCHITECTURES).items()}
    return lambda op: objects[op].with_name(f"{op}.compute_90a.ptx").read_text()


@pytest.mark.parametrize(("op", "kernel"), WIDE)
def test_long_rows_and_columns_move_16_bytes_at_a_time(op, kernel, ptx):
    """Checked in PTX: the assembler turns four-word accesses into LDG.E.128 and STG.E.128."""
    mine = [x for x in re.split(r"\.entry ", ptx(op)) if re.match(rf"\w+{kernel}", x)]
    assert len(mine) == 1, f"{kernel} is not in the PTX"
    for access in WIDE[op, kernel]:
        assert re.search(rf"{access}\.global\S*\.v4\.[ubf]32", mine[0]), f"{kernel} has no 16-byte {access}"


@pytest.mark.parametrize("op", SOURCES)
def test_one_condition_leads_to_a_barrier_by_one_branch(op, ptx):
    """ptxas 12.8 to 13.5 closes only the last of several branches of some lanes to the code before a barrier.

    The lanes of a warp then meet the barrier one after another, and it lets the warp pass too early. nvcc
    makes such branches from two ifs on the same condition with nothing between them for the whole warp.
    """
    for kernel in ptx(op).split(".entry ")[1:]:
        branches = Counter(re.findall(r"@(!?%p\d+) bra(?:\.uni)?\s+(\S+);", kernel))
        assert branches, "the kernel's branches were not recognised"
        for (condition, label), times in branches.items():
            start = kernel.split(f"\n{label}:")[1]
            straight = re.split(r"\bbra\b|\n\$", start)[0]  # up to the next branch or label
            assert times == 1 or not re.search(r"\bbar(rier)?\.", straight), f"{condition} to {label}"
