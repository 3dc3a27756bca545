"""The checks of tools/check_gpu.py that run in a Python process of their own.

A check is a function without arguments that returns its results as a dict for JSON and raises an error if
something is wrong. `python -m gpu_checks.MODULE NAME FILE` calls it and writes the results. Every check runs
on a GPU and, with smaller sizes, on a CPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(*checks: Callable[[], dict[str, Any]]) -> None:
    """Run the check that the command line names, and write its results to the file that it names."""
    name, file = sys.argv[1:]
    (check,) = (one for one in checks if one.__name__ == name)
    Path(file).write_text(json.dumps(check()), encoding="utf-8")
