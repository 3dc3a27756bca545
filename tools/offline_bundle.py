"""Pack what a GPU machine without a network lacks, here; it is unpacked there with one command.

    python tools/offline_bundle.py build --output FOLDER [--python python3.12] [--present FILE] [--model]
        [--architecture 90] [--small] [--part-mib 0]
    python tools/offline_bundle.py rehearse FOLDER [--python python3.12] [--present FILE]

`build` needs a package index, git, and nvcc of the machine's CUDA release (CUDA_HOME, or on PATH). It
downloads the packages of tools/lock-offline.txt, removes the GPU code of other architectures, compiles csrc/
for that Python and architecture, and adds the last commit of this repository. FOLDER gets unpack.py,
manifest.json and the streams packages and, with --model, model (SmolLM2-135M-Instruct, for examples/smollm2),
each in parts of at most --part-mib MiB (0: one part). Copy FOLDER to the machine; there, with the Python that
has torch:

    python3 FOLDER/unpack.py /scratch/stppo && source /scratch/stppo/activate

FILE is the output of `python3 -m pip list --format=freeze` there: what it names, and is not older than in the
lock file, is left out. --small leaves out PTX and the parts of vLLM that a model in bfloat16 on Hopper does
not use: then a GPU of another architecture and quantised models cannot be served.

`rehearse` shows here, without a GPU, that a bundle is complete: in a new environment with that Python, torch
and the packages of FILE, and in a network namespace without a route, it unpacks the bundle, imports what a
GPU would, and computes on the CPU what needs no engine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from tools.cuda_environment.packages import pinned
from tools.offline.fatbin import without_other_architectures
from tools.processes import ROOT, run

LOCK = ROOT / "tools" / "lock-offline.txt"
TORCH, GIT = "2.11.0", ("git", "-C", str(ROOT))
# of vLLM: other attention than FlashAttention 3, its server, kernels for quantised weights
SMALL = (
    *("vllm-rs", "third_party/deep_gemm", "vllm_flash_attn/_vllm_fa2_C.abi3.so"),
    *("_flashmla_C.abi3.so", "_flashmla_extension_C.abi3.so", "_qutlass_C.abi3.so"),
)
# with sh, in the folder of the unpacked repository, after `source activate`
REHEARSED = {
    "no route": "! ip route get 192.0.2.1",
    "versions": "python3 -c 'import torch, transformers, vllm; "
    "print(torch.__version__, transformers.__version__, vllm.__version__)'",
    "imports as on a GPU": "python3 tools/check_cuda_environment.py --only imports",
    "vLLM's models": "python3 tools/check_cuda_environment.py --only engine",
    "training on the CPU": "python3 tools/check_gpu.py training --device cpu --limits 4",
    "the real model on the CPU": "python3 tools/check_gpu.py real --device cpu --limits 6",
}
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6}]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("build", "rehearse"))
    parser.add_argument("folder", nargs="?", type=Path, help="of `rehearse`: the bundle")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of `build`: the bundle")
    parser.add_argument("--python", default="python3.12", help="a Python of the machine's release")
    parser.add_argument(
        "--present", type=Path, metavar="FILE", help="the machine's packages, as pip freezes them"
    )
    parser.add_argument("--architecture", type=int, default=90, help="of the GPU; 90: Hopper")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--model", action="store_true", help="add SmolLM2-135M-Instruct")
    parser.add_argument("--part-mib", type=float, default=0)
    given = parser.parse_args(argv)
    folder = given.output if given.command == "build" else given.folder
    if folder is None:
        parser.error("build needs --output FOLDER, rehearse needs FOLDER")
    try:
        present = listed(given.present) if given.present else {}
        if given.command == "rehearse":
            return rehearse(folder.resolve(), given.python, given.present)
        build(folder.resolve(), present, given)
    except (OSError, ValueError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"offline_bundle: {error}", file=sys.stderr)
        return 1
    return 0


def build(output: Path, present: dict[str, str], given: argparse.Namespace) -> None:
    """Write the bundle. Raises OSError, ValueError, RuntimeError or CalledProcessError."""
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output}: is not empty; remove it, or choose another folder")
    output.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}=={version}" for name, version in missing(listed(LOCK), present)]
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        stage = Path(scratch) / "packages"
        say(f"{len(wanted)} packages: {' '.join(wanted)}")
        pip = (given.python, "-m", "pip")
        options = ["--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", "--target", stage]
        run([*pip, "install", *options, *wanted])
        say(f"{trim(stage, given.architecture, given.small) >> 20} MiB for other architectures removed")
        repository = Path(scratch) / "megatron_stppo"
        add_repository(repository, Path(scratch) / "wheel", pip, given.architecture)
        streams = {"packages": write_stream(output, "packages", [stage, repository], given.part_mib)}
    if given.model:
        streams["model"] = write_stream(
            output, "model", [model_file()], given.part_mib, "megatron_stppo/runs/models"
        )
    version = output_of(given.python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    manifest = {
        "python": version.decode().strip(),
        "torch": TORCH,
        "architecture": given.architecture,
        "commit": output_of(*GIT, "rev-parse", "HEAD").decode().strip(),
        "packages": wanted,
        "streams": streams,
    }
    (output / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.copy(ROOT / "tools/offline/unpack.py", output)


def listed(path: Path) -> dict[str, str]:
    """Return {name: version} of the lines NAME==VERSION. Raises ValueError if there is none."""
    found = pinned(path)
    if not found:
        raise ValueError(f"{path}: has no line NAME==VERSION; write it with `pip list --format=freeze`")
    return found


def missing(lock: dict[str, str], present: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what the lock file names and the machine does not have, or has in an older version."""
    for name, version in lock.items():
        if name not in present or numbers(present[name]) < numbers(version):
            yield name, version


def numbers(version: str) -> list[int]:
    """Return the numbers of a release. Example: [2, 11, 0] for "2.11.0+cu130"."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def trim(packages: Path, architecture: int, small: bool) -> int:
    """Remove what the GPU cannot use, in place. Return the number of bytes."""
    removed = 0
    for name in SMALL if small else ():
        path = packages / "vllm" / name
        removed += sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for library in packages.rglob("*.so*"):
        code, zeroed = without_other_architectures(library.read_bytes(), architecture, ptx=not small)
        if zeroed:
            library.write_bytes(code)
        removed += zeroed
    return removed


def add_repository(folder: Path, scratch: Path, pip: Sequence[str], architecture: int) -> None:
    """Write the files of the last commit, with csrc/ compiled for that Python and architecture."""
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    archive.write_bytes(output_of(*GIT, "archive", "HEAD"))
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    say("compiling csrc/")
    archs = f"{architecture}{'a' if architecture >= 90 else ''}"
    run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, folder], {"STPPO_CUDA_ARCHS": archs})
    (wheel,) = scratch.glob("*.whl")
    shutil.unpack_archive(wheel, scratch, "zip")
    for library in (scratch / "megatron_stppo").glob("*.so"):
        shutil.copy(library, folder / "megatron_stppo")
    if not any((folder / "megatron_stppo").glob("*.so")):
        raise ValueError("csrc/ was not compiled; it needs g++, and nvcc in CUDA_HOME or on PATH")


def model_file() -> Path:
    """Return the GGUF file of examples/smollm2, downloaded if it is not there."""
    sys.path += [str(ROOT / "examples/smollm2"), str(ROOT / "examples/quickstart")]
    from pretrained import fetched

    return fetched(ROOT / "runs/models")


def write_stream(
    output: Path, name: str, paths: Sequence[Path], part_mib: float, inside: str = ""
) -> dict[str, Any]:
    """Write the paths as NAME.1, NAME.2 ..., which together are a tar file, compressed by xz."""
    packed = output / f"{name}.tar.xz"
    say(f"packing {name}")
    with lzma.open(packed, "wb", filters=FILTERS) as file, tarfile.open(fileobj=file, mode="w|") as archive:
        for path in paths:
            archive.add(path, f"{inside}/{path.name}".lstrip("/"), filter=anonymous)
    with tarfile.open(packed, mode="r|xz") as archive:
        files = sum(entry.isfile() for entry in archive)
    size, parts = int(part_mib * 2**20) or packed.stat().st_size, []
    with packed.open("rb") as source:
        while piece := source.read(size):
            part = output / f"{name}.{len(parts) + 1}"
            part.write_bytes(piece)
            parts.append(
                {"name": part.name, "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()}
            )
            say(f"{part}: {len(piece) / 2**20:.1f} MiB")
    packed.unlink()
    return {"files": files, "parts": parts}


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out owners, so that the same files give the same archive, and byte code."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if "__pycache__" in entry.name else entry


def rehearse(bundle: Path, python: str, present: Path | None) -> int:
    """Return the number of failed steps. Needs a package index for torch and the packages of `present`."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        run([python, "-m", "venv", home / "machine"])
        pip = [home / "machine/bin/python", "-m", "pip", "install", "--quiet"]
        run([*pip, f"torch=={TORCH}", *(["-r", present] if present else [])])
        target = home / "unpacked"
        steps = {"unpack": f"python3 {bundle}/unpack.py {target}"}
        steps |= {name: f"source {target}/activate && {line}" for name, line in REHEARSED.items()}
        failed = [name for name, line in steps.items() if not done(name, line, home)]
        for kept in (target / "megatron_stppo/runs").glob("check-*"):
            shutil.copytree(kept, bundle / "rehearsed" / kept.name, dirs_exist_ok=True)
    print(f"{len(steps) - len(failed)} of {len(steps)} steps; failed: {', '.join(failed) or 'none'}")
    return len(failed)


def done(name: str, line: str, home: Path) -> bool:
    """Run a step in a namespace without a route, without the variables of this process."""
    kept = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
    environment = {
        **kept,
        "PATH": f"{home}/machine/bin:/usr/local/bin:/usr/bin:/bin",
        "CUDA_VISIBLE_DEVICES": "",
    }
    print(f"--- {name}", flush=True)
    began = time.monotonic()
    # torch.distributed needs the loopback device
    inside = ["unshare", "--net", "--map-root-user", "bash", "-c", f"ip link set lo up && {line}"]
    status = subprocess.run(inside, cwd=home, env=environment, check=False).returncode
    print(f"--- {name}: {'ok' if status == 0 else 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)
    return status == 0


def output_of(*line: str) -> bytes:
    return subprocess.run(line, capture_output=True, check=True).stdout


def say(text: str) -> None:
    print(f"offline_bundle: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
