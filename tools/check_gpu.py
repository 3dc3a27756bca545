"""Build, test and measure every kernel on the GPU of this machine, in under 8 minutes.

    python tools/check_gpu.py [--output FOLDER] [--minutes 8]

Needs torch (a CUDA build), nvcc (on PATH or under CUDA_HOME), g++, and pip if a package is missing. The steps
are: build the extension in place; run tests/ops on the GPU; repeat every op 100 times and compare bits; run
compute-sanitizer on a call of every op; run tools/benchmark_kernels.py; compile every .cu file for every
architecture. A step that fails does not stop the later ones; the exit status is the number of failed steps.
FOLDER (default: $OUT, else runs/check-gpu) gets check-gpu.log, summary.json, and the benchmark's files under
benchmark/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# {module needed for building and testing: its requirement for pip}
NEEDED = {"pybind11": "pybind11>=3", "setuptools": "setuptools>=77", "pytest": "pytest>=9", "numpy": "numpy"}
NEEDED |= {"hypothesis": "hypothesis>=6"}


@dataclass
class Step:
    """One line of the summary. `outcome` is ok, FAILED or skipped; `detail` is the reason if it is not ok."""

    name: str
    outcome: str
    seconds: float
    detail: str = ""


@dataclass
class Run:
    output: Path
    deadline: float  # on the clock of time.monotonic
    steps: list[Step] = field(default_factory=list)

    def step(self, name: str, timeout: float, line: Sequence[str], **environment: str) -> bool:
        """Run a command in the repository's root. The log gets its output, the summary its outcome."""
        begin = time.monotonic()
        limit = min(timeout, self.deadline - begin)
        if limit < 5:
            return self.note(Step(name, "FAILED", 0, "no time left; increase --minutes"))
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            **environment,
        }
        with (self.output / "check-gpu.log").open("ab") as log:
            log.write(f"\n===== {name}: {' '.join(line)}\n".encode())
            log.flush()
            place = log.tell()
            try:
                status = subprocess.run(
                    line, cwd=ROOT, env=settings, stdout=log, stderr=log, timeout=limit, check=False
                ).returncode
                detail = f"exit status {status}"
            except subprocess.TimeoutExpired:
                status, detail = 1, f"not done after {limit:.0f} s"
        if status:
            with (self.output / "check-gpu.log").open("rb") as log:
                log.seek(place)
                said = log.read().decode(errors="replace").strip().splitlines()
            detail += "".join(f"\n    {x}" for x in said[-25:])
        seconds = time.monotonic() - begin
        return self.note(Step(name, "FAILED" if status else "ok", seconds, detail if status else ""))

    def note(self, step: Step) -> bool:
        self.steps.append(step)
        print(f"{step.outcome:8} {step.seconds:6.1f} s  {step.name}  {step.detail}", flush=True)
        return step.outcome == "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(os.environ.get("OUT") or ROOT / "runs/check-gpu")
    parser.add_argument("--output", type=Path, default=default, metavar="FOLDER")
    parser.add_argument(
        "--minutes", type=float, default=8, help="limit; checks not done by then count as failed"
    )
    parser.add_argument(
        "--only", choices=list(INSIDE), help="run one check in this process; the script calls itself so"
    )
    arguments = parser.parse_args()
    if arguments.only:
        sys.path.insert(0, str(ROOT))
        return INSIDE[arguments.only]()

    begin = time.monotonic()
    arguments.output.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.output.resolve(), begin + 60 * arguments.minutes)
    (run.output / "check-gpu.log").write_bytes(b"")
    if complaint := missing():
        run.note(Step("environment", "FAILED", time.monotonic() - begin, complaint))
    else:
        about = machine()
        print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
        check(run)
        summary = {**about, "steps": [asdict(step) for step in run.steps]}
        (run.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    failed = [step.name for step in run.steps if step.outcome == "FAILED"]
    print(f"{time.monotonic() - begin:.0f} s; failed: {', '.join(failed) or 'nothing'}; see {run.output}")
    return len(failed)


def check(run: Run) -> None:
    this = [sys.executable, str(Path(__file__).resolve())]
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    archs = os.environ.get("STPPO_CUDA_ARCHS") or architecture()
    build = [sys.executable, "setup.py", "build_ext", "--inplace", "--build-temp", str(run.output / "build")]
    built = run.step(f"extension for sm_{archs}", 180, build, STPPO_CUDA_ARCHS=archs)
    shutil.rmtree(run.output / "build", ignore_errors=True)
    if built:
        run.step("tests/ops on the GPU", 180, [*tests, "tests/ops", "-k", "not cpu"])
        run.step("100 bitwise repeats", 60, [*this, "--only", "repeats"])
        sanitize(run, [*this, "--only", "calls"])
        benchmark = [
            "tools/benchmark_kernels.py",
            "--device",
            "cuda",
            "--output",
            str(run.output / "benchmark"),
        ]
        run.step("benchmark", 300, [sys.executable, *benchmark])
    else:
        run.note(
            Step("tests, repeats, compute-sanitizer, benchmark", "skipped", 0, "they need the extension")
        )
    # the last step, because it needs no GPU
    run.step("every .cu for every architecture", 120, [*tests, "tests/csrc/test_cuda_build.py", "-rsP"])


def sanitize(run: Run, call: Sequence[str]) -> None:
    places = [shutil.which("compute-sanitizer"), f"{os.environ.get('CUDA_HOME', '')}/bin/compute-sanitizer"]
    places += ["/usr/local/cuda/bin/compute-sanitizer"]
    tool = next((x for x in places if x and Path(x).is_file()), None)
    if tool is None:
        run.note(Step("compute-sanitizer", "skipped", 0, "not on PATH nor under CUDA_HOME"))
        return
    for name in TOOLS:
        line = [tool, "--tool", name, "--error-exitcode", "9", *call]
        # torch's cache would hide reads beyond a tensor's end
        run.step(f"compute-sanitizer {name}", 75, line, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def missing() -> str:
    """Install missing Python packages. Return what this machine still lacks, or an empty string."""
    try:
        import torch
    except ImportError:
        return "torch is not installed; install a CUDA build of it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU; see nvidia-smi, and install a CUDA build of torch"
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if shutil.which("nvcc") is None:
        if not Path(home, "bin/nvcc").is_file():
            return "nvcc is neither on PATH nor under CUDA_HOME; install the CUDA toolkit"
        os.environ["CUDA_HOME"] = home
    if shutil.which("g++") is None:
        return "g++ is not on PATH; install it"
    wanted = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if wanted:
        line = [sys.executable, "-m", "pip", "install", "--quiet", *wanted]
        done = subprocess.run(line, capture_output=True, text=True, timeout=90)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            return f"{', '.join(wanted)}: not installed, and pip could not ({reason}); bring wheels along"
    return ""


def architecture() -> str:
    """Return the GPU's architecture as nvcc names it. Example: 90a for an H100."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def machine() -> dict[str, Any]:
    import torch

    said = subprocess.run(
        [os.environ.get("CUDA_HOME", "") + "/bin/nvcc" if "CUDA_HOME" in os.environ else "nvcc", "--version"],
        capture_output=True,
        text=True,
    ).stdout
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nvcc": next((x.split("release ")[1] for x in said.splitlines() if "release " in x), "unknown"),
    }


def calls() -> int:
    """Run every op once, forward and backward, on small inputs that cover every path of its kernels."""
    import torch

    from megatron_stppo import ops
    from tests.ops.draws import logprob_and_gradient, normal, offsets_of, rows, three, unaligned, uniform
    from tests.ops.test_two_phases import test_two_parts_of_every_turn_make_the_whole as two_phases

    os.environ["STPPO_OPS"] = "extension"
    with torch.device("cuda"):
        lengths = [1, 0, 40_000, 33_000, 5, 300, 700, *[3] * 50]
        total = sum(lengths)
        settings = {"weight": uniform(total), "sum_p_sq": uniform(total, seed=1), "with_bias": True}
        for segments in (None, offsets_of(*lengths)):
            new, old, advantage = three(total)
            out = ops.clipped_surrogate(new.requires_grad_(), old, advantage, segments, **settings)
            out.objective.backward()
        two_phases("mean", None, 0.5)
        for columns in (1003, 4096):
            for dtype in (torch.float32, torch.bfloat16):
                logits, target = rows(3, columns)
                logprob_and_gradient(logits.to(dtype), target, temperature=0.5 + uniform(3))
                logprob_and_gradient(unaligned(logits.to(dtype)), target, vocab_size=columns)
        lengths = [3, 0, 5000, 1]
        given = (normal(5004), normal(5004, seed=1), offsets_of(*lengths))
        ops.gae(*given, lam=0.9)
        ops.gae(*given, lam=0.9, turn_offsets=offsets_of(3, 2000, 3000, 1))
        wide, narrow = normal(40, 33), torch.empty(40, 17, dtype=torch.bfloat16)
        ops.bucket_copy([wide[:, :17], wide[:, 16:]], [narrow, torch.empty(40, 17)])
        ops.BucketChecksum([wide[:, :17], wide, narrow], [torch.bfloat16, torch.float32, torch.bfloat16])()
        for dtype in (torch.float32, torch.bfloat16):
            hidden, weight = (normal(n, 32).to(dtype).requires_grad_() for n in (64, 1003))
            target = rows(64, 1003)[1]
            sum(x.sum() for x in ops.linear_logprob(hidden, weight, target, chunk=17)).backward()
            weight.main_grad = torch.zeros(weight.shape)
            ops.linear_loss(hidden, weight, target, [0, 0, 20, 64], a_third)[0].backward()
    torch.cuda.synchronize()
    return 0


def a_third(chunk: Any) -> tuple[Any, Any]:
    """Return the loss of a chunk in which two of three rows have no gradient."""
    import torch

    logprob = chunk.logprob
    kept = torch.arange(len(logprob), device=logprob.device) % 3 == 0
    return logprob.masked_fill(~kept, 0).sum(), logprob.detach().sum().reshape(1)


def repeats() -> int:
    """Run each op 100 times at the size of a training step, and compare the bits."""
    import torch

    from megatron_stppo import ops
    from tests.ops.draws import logprob_and_gradient, normal, offsets_of, rows, same_bits, three, uniform

    os.environ["STPPO_OPS"] = "extension"
    wrong = 0
    with torch.device("cuda"):
        lengths = [131_072, 40_000, 33_000, *[150] * 5000, *[1] * 1000]
        total, cut = sum(lengths), offsets_of(*lengths)
        settings = {"weight": uniform(total), "sum_p_sq": uniform(total, seed=1), "with_bias": True}
        given, (logits, target) = three(total), rows(256, 151_936)
        narrow, steps = logits.bfloat16(), (normal(total), normal(total, seed=1))
        head = [normal(n, 512).bfloat16().requires_grad_() for n in (4096, 151_936)]
        labels = rows(4096, 151_936)[1]

        def linear_loss() -> Sequence[torch.Tensor]:
            total, *_ = ops.linear_loss(*head, labels, [0, 1500, 4096], a_third)
            return total, *torch.autograd.grad(total, head)

        def linear_logprob() -> Sequence[torch.Tensor]:
            out = ops.linear_logprob(*head, labels, chunk=1500)
            return *out, *torch.autograd.grad(sum(x.sum() for x in out), head)

        def copied() -> Sequence[torch.Tensor]:
            out = torch.empty(logits.shape, dtype=torch.bfloat16)
            ops.bucket_copy([logits], [out])
            return [out]

        ops_of: dict[str, Callable[[], Sequence[torch.Tensor]]] = {
            "clipped_surrogate by turn": lambda: ops.clipped_surrogate(*given, cut, **settings),
            "clipped_surrogate by token": lambda: ops.clipped_surrogate(*given, **settings),
            "vocab_logprob float32": lambda: logprob_and_gradient(logits, target),
            "vocab_logprob bfloat16": lambda: logprob_and_gradient(narrow, target),
            "bucket_copy": copied,
            "linear_loss bfloat16": linear_loss,
            "linear_logprob bfloat16": linear_logprob,
            "gae by token": lambda: ops.gae(*steps, cut, lam=0.95),
            "gae by turn": lambda: ops.gae(*steps, offsets_of(total), lam=0.95, turn_offsets=cut),
        }
        for name, evaluate in ops_of.items():
            first = evaluate()
            different = sum(not same_bits(first, evaluate()) for _ in range(99))
            print(f"{name}: {different} of 99 repeats differ")
            wrong += different
    return int(wrong > 0)


INSIDE = {"calls": calls, "repeats": repeats}

if __name__ == "__main__":
    raise SystemExit(main())
