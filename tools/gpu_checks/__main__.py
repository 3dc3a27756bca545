"""Call a check and write its results: python -m tools.gpu_checks MODULE NAME FILE."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    module, name, file = sys.argv[1:]
    if module in ("training", "resume", "layer_slice"):
        from megatron_stppo.cluster.launch import process

        process.prepare(engine=False)  # before their imports of megatron
    check = getattr(importlib.import_module(f"tools.gpu_checks.{module}"), name)
    Path(file).write_text(json.dumps(check()), encoding="utf-8")
