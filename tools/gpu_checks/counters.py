"""Run Nsight Compute on the kernels: how far each is from the limits of memory and of issue slots."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from typing import Any

from gpu_checks import main

METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue %",
    "gpu__time_duration.sum": "time",
}
# of csrc/*.cu; torch has kernels of its own whose names contain one of these words without _kernel
KERNELS = "regex:(segments|tokens|statistics|gradient|copy)_kernel"


def counters() -> dict[str, Any]:
    """Run `kernels.profiled` under Nsight Compute and return the metrics of every kernel launch."""
    ncu = shutil.which("ncu") or f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/ncu"
    line = [ncu, "--metrics", ",".join(METRICS), "--clock-control", "none", "--csv", "--page", "raw"]
    line += ["--kernel-name", KERNELS, "--launch-count", "40"]
    line += [sys.executable, "-m", "gpu_checks.kernels", "profiled", os.devnull]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False, encoding="utf-8")
    print(done.stdout, flush=True)
    if done.returncode:
        raise AssertionError(f"ncu ended with exit status {done.returncode}")
    return read(done.stdout)


def read(said: str) -> dict[str, Any]:
    """Return {launch: its metrics} of ncu's raw CSV, which follows the program's own output.

    The line of column names is followed by a line of units.
    """
    lines = said[max(0, said.find('"ID"')) :].splitlines()
    names, units, *rows = list(csv.reader(lines)) or [[], []]
    unit = dict(zip(names, units, strict=False))
    found: dict[str, Any] = {}
    for number, row in enumerate(rows):
        of = dict(zip(names, row, strict=False))
        kernel = re.sub(r"\(.*|^.*::", "", of.get("Kernel Name", "?"))
        numbers = (
            f"{short} {of[name]} {unit[name]}".strip(" %") for name, short in METRICS.items() if name in of
        )
        found[f"{number} {kernel}"] = ", ".join(numbers)
    if not found:
        raise AssertionError("ncu reported no kernel")
    return found


if __name__ == "__main__":
    main(counters)
