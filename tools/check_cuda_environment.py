"""Check the CUDA environment of `make .venv-gpu` on a machine that needs no GPU.

    .venv-gpu/bin/python tools/check_cuda_environment.py [--json FILE] [--only GROUP]

Each check prints one line with its outcome and seconds. The exit status is the number of checks that failed.
If there is no driver, a library whose functions all return "stub library" takes its place, so that libraries
that link to the driver can be loaded. tools/cuda_environment/stand_ins.py contains everything that replaces a
real part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the import below
from tools.cuda_environment import engine, extension, imports, installed, stand_ins, trainer  # noqa: E402

# each runs in a process of its own
GROUPS = {
    "installed": installed.checks,
    "commands": installed.commands,
    "imports": imports.checks,
    "extension": extension.checks,
    "trainer": trainer.checks,
    "engine": engine.checks,
}
MARK = "check: "  # begins the lines of a group's process that are results


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the CUDA environment; see the docstring.")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--only", choices=GROUPS, action="append", help="run this group; can be repeated")
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)  # used by this file only
    given = parser.parse_args()
    if given.group:
        run_group(given.group)
        return 0
    results = []
    with tempfile.TemporaryDirectory() as folder:
        environment = prepared(Path(folder))
        for group in given.only or GROUPS:
            results += results_of(group, environment)
    failed = sum(not result["passed"] for result in results)
    print(f"{len(results)} checks, {failed} failed")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return min(failed, 100)


def prepared(folder: Path) -> dict[str, str]:
    """Return the environment variables of the groups, with a stub of the driver if there is none."""
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *more]),
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if stand_ins.has_driver():
        print("driver: libcuda.so.1 of this machine")
    else:
        packages = [Path(sysconfig.get_path("platlib")), *map(Path, more)]
        count = stand_ins.write_stub(packages, folder)
        environment["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
        print(f"driver: none; {count} functions that return an error take its place", flush=True)
    return environment


def results_of(group: str, environment: dict[str, str]) -> list[dict]:
    """Run a group in a process, print its lines, and return its results."""
    results = []
    line = [sys.executable, __file__, "--group", group]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        start = time.monotonic()
        with subprocess.Popen(
            line,
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
        ) as process:
            assert process.stdout is not None
            for said in process.stdout:
                if said.startswith(MARK):
                    results.append(json.loads(said.removeprefix(MARK)))
                    show(results[-1])
        if process.returncode:
            errors.seek(0)
            said = f"exit status {process.returncode}\n{errors.read()[-3000:]}"
            seconds = time.monotonic() - start
            results.append({"check": group, "passed": False, "seconds": seconds, "said": said})
            show(results[-1])
    return results


def show(result: dict) -> None:
    said = result["said"] if result["passed"] else result["said"].replace("\n", "\n        ")
    outcome = "ok" if result["passed"] else "FAILED"
    print(f"{outcome:6}  {result['seconds']:6.1f} s  {result['check']}: {said}", flush=True)


def run_group(group: str) -> None:
    """Run the checks of a group: (name, function), where the function returns what to print or raises."""
    for name, check in GROUPS[group]():
        start, passed = time.monotonic(), True
        try:
            said = check()
        except Exception as error:
            said, passed = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-2500:]}", False
        seconds = round(time.monotonic() - start, 1)
        result = {"check": name, "passed": passed, "seconds": seconds, "said": said}
        print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
