"""Checks of the installed packages: versions, imports as on a GPU, and the extension that nvcc has built."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from tools.cuda_environment import stand_ins

TOOLS = Path(__file__).parents[1]
NEEDED = ("torch", "vllm", "megatron-core", "transformer-engine-torch", "megatron-stppo")
# not pinned: what venv installs, and the package itself
FREE = {"pip", "megatron-stppo"}
CPU_ONLY = "megatron_stppo.rollout.vllm.cpu"
STAND_IN = "vllm.v1.worker.cpu.shm"  # replaces functions of torch while it is imported
LAUNCH_FAILED = 2  # csrc/ops.h
Checks = Iterator[tuple[str, Callable[[], str]]]


def installed() -> Checks:
    yield "versions", versions
    yield "requirements", requirements


def commands() -> Checks:
    yield "plan without a GPU", plan


def imports() -> Checks:
    before = _functions()
    stand_ins.install_platform()
    yield "imports of the engine", engine
    if importlib.util.find_spec("transformer_engine"):  # a bundle has none
        yield "imports of TransformerEngine", transformer_engine
    yield "imports of megatron_stppo", package
    yield "no stand-in of the CPU", lambda: own_functions(before)


def extension() -> Checks:
    yield "nvcc", compiler
    yield "extension", loaded
    yield "launch of a CUDA kernel", launched


def pinned(path: Path) -> dict[str, str]:
    """Return {name: version} of the lines NAME==VERSION of a file."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {plain(name): version for name, _, version in (line.partition("==") for line in lines) if version}


def versions() -> str:
    wanted = pinned(TOOLS / "constraints-gpu.txt") | pinned(TOOLS / "overrides-gpu.txt")
    found = {plain(one.metadata["Name"]): one.version for one in metadata.distributions()}
    missing = [name for name in NEEDED if name not in found]
    assert not missing, f"not installed: {missing}"
    other = {name: version for name, version in found.items() if wanted.get(name) != version}
    other = {name: version for name, version in other.items() if name not in FREE}
    assert not other, f"not the pinned versions: {other}"
    python = sys.version.split()[0]
    return f"{len(found)} packages on Python {python}; " + ", ".join(f"{n} {found[n]}" for n in NEEDED[:-1])


def requirements() -> str:
    line = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
    wrong = unexpected(done.stdout) if done.returncode else []
    assert not wrong, wrong
    return done.stdout.strip()


def unexpected(output: str) -> list[str]:
    """Return the lines of `pip check` that are not about a version of overrides-gpu.txt."""
    endings = tuple(
        f"but you have {name} {version}." for name, version in pinned(TOOLS / "overrides-gpu.txt").items()
    )
    return [line for line in output.strip().splitlines() if not line.endswith(endings)]


def plan() -> str:
    """Run `plan`, without the stub of the driver. megatron must not import packages that need a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    line = [sys.executable, "-m", "megatron_stppo", "plan", "examples/qwen2.5-7b/config.yaml", "--gpus", "8"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, (done.stdout + done.stderr)[-2500:]
    return done.stdout.strip().splitlines()[-1]


def plain(name: str) -> str:
    """Return the name of a package as indexes write it. Example: "ml-dtypes" for "ML_dtypes"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def engine() -> str:
    """Import what cluster/launch/process.py imports of vLLM."""
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu_model_runner
    import vllm.v1.worker.gpu_worker

    return f"vLLM {vllm.__version__}"


def transformer_engine() -> str:
    found = importlib.import_module("transformer_engine.pytorch")
    from megatron.core.models.gpt import gpt_layer_specs

    assert gpt_layer_specs.HAVE_TE, "megatron has not found it"
    return f"{len(vars(found))} names"


def package() -> str:
    import megatron_stppo

    names = [found.name for found in pkgutil.walk_packages(megatron_stppo.__path__, "megatron_stppo.")]
    names = [name for name in names if name != CPU_ONLY and not name.endswith("__main__")]
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert not failed, failed
    return f"{len(names)} modules"


def own_functions(before: dict[str, object]) -> str:
    changed = [name for name, function in _functions().items() if function is not before[name]]
    assert not changed, f"{changed} were replaced"
    loaded = [name for name in (STAND_IN, CPU_ONLY) if name in sys.modules]
    assert not loaded, f"{loaded} were imported"
    return f"{len(before)} functions of torch are its own"


def _functions() -> dict[str, object]:
    import torch

    names = {
        torch: ("Event", "empty", "tensor"),
        torch.cuda: ("Event", "Stream", "stream", "current_stream", "current_device", "synchronize"),
        torch.accelerator: ("synchronize", "empty_cache", "get_memory_info"),
        torch.Tensor: ("pin_memory", "record_stream", "cuda", "type"),
        torch.distributed: ("all_gather", "reduce_scatter"),
    }
    return {f"{o.__name__}.{name}": getattr(o, name) for o, each in names.items() for name in each}


def compiler() -> str:
    home = os.environ.get("CUDA_HOME")
    assert home, "CUDA_HOME is not set; make check-cuda-environment sets it"
    done = subprocess.run(
        [f"{home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    return next(line for line in done.stdout.splitlines() if "release" in line)


def loaded() -> str:
    import torch

    from megatron_stppo.ops import BucketCopy
    from megatron_stppo.ops.extension import parts, serves

    assert "cuda" in parts(), f"built for {parts() or 'nothing'}: nvcc was not found"
    assert serves(torch.device("cpu"))
    target = torch.zeros(1, 2, dtype=torch.bfloat16)
    BucketCopy([torch.tensor([[1.0, 2.0]])], [target])()
    assert target.tolist() == [[1.0, 2.0]], target
    return f"built for {parts()['cuda']}; its CPU kernels compute"


def launched() -> str:
    """Without a GPU, a launch must return the error of CUDA's runtime, which is linked into the extension."""
    import torch

    from megatron_stppo import _csrc

    slices, owners = torch.zeros(8, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    float32, on_gpu, stream = 0, True, 0
    status = _csrc.bucket_copy(
        *(slices.data_ptr(), 1, owners.data_ptr(), 1, float32, float32, on_gpu, stream)
    )
    assert status == LAUNCH_FAILED, f"status {status}"
    return "refused by CUDA's runtime: no GPU"
