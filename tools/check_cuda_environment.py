"""Check the CUDA environment of `make .venv-gpu` on a machine that needs no GPU.

    .venv-gpu/bin/python tools/check_cuda_environment.py [--only GROUP]

Each check prints one line with its outcome and seconds. The exit status is the number of checks that failed.
If there is no driver, a library whose functions all return "stub library" takes its place, so that libraries
that link to the driver can be loaded. tools/cuda_environment/stand_ins.py contains everything that replaces a
real part.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from tools.cuda_environment import engine, packages, stand_ins, trainer
from tools.processes import ROOT, started, variables

# each runs in a process of its own
GROUPS = {
    "installed": packages.installed,
    "commands": packages.commands,
    "imports": packages.imports,
    "extension": packages.extension,
    "trainer": trainer.checks,
    "engine": engine.checks,
}
MOST = 100  # an exit status above it is not a number of failed checks


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the CUDA environment; see the docstring.")
    parser.add_argument("--only", choices=GROUPS, action="append", help="run this group; can be repeated")
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)  # used by this file only
    given = parser.parse_args()
    if given.group:
        return run_group(given.group)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        environment = prepared(Path(folder))
        for group in given.only or GROUPS:
            line = [sys.executable, __file__, "--group", group]
            with started(line, env=environment, cwd=ROOT) as process:
                status = process.wait()
            if not 0 <= status <= MOST:
                print(f"FAILED  {group}: exit status {status}", flush=True)
            failed += status if 0 <= status <= MOST else 1
    print(f"{failed} failed")
    return min(failed, MOST)


def prepared(folder: Path) -> dict[str, str]:
    """Return the environment variables of the groups, with a stub of the driver if there is none."""
    environment = variables(
        {
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    )
    if stand_ins.has_driver():
        print("driver: libcuda.so.1 of this machine", flush=True)
    else:
        more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        count = stand_ins.write_stub([Path(sysconfig.get_path("platlib")), *map(Path, more)], folder)
        environment["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
        print(f"driver: none; {count} functions that return an error take its place", flush=True)
    return environment


def run_group(group: str) -> int:
    """Run the checks of a group: (name, function), where the function returns what to print or raises.

    Return the number of checks that failed.
    """
    failed = 0
    for name, check in GROUPS[group]():
        start, outcome = time.monotonic(), "ok"
        try:
            said = check()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-2500:]}"
            said, outcome, failed = reason.replace("\n", "\n        "), "FAILED", failed + 1
        print(f"{outcome:6}  {time.monotonic() - start:6.1f} s  {name}: {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
