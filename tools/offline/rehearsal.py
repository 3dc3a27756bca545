"""Unpack and use a bundle on this machine as on one without a network: Python, torch, no route, no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

# with sh, in the folder of the unpacked repository, after `source activate`
STEPS = {
    "no route": "! ip route get 192.0.2.1",
    "versions": "python3 -c 'import torch, transformers, vllm; "
    "print(torch.__version__, transformers.__version__, vllm.__version__)'",
    "imports as on a GPU": "python3 tools/check_cuda_environment.py --only imports",
    "vLLM's models": "python3 tools/check_cuda_environment.py --only engine",
    "training on the CPU": "python3 tools/check_gpu.py training --device cpu --limits 4",
    "the real model on the CPU": "python3 tools/check_gpu.py real --device cpu --limits 6",
}


def rehearse(bundle: Path, python: str, torch: str, present: Path | None) -> int:
    """Return the number of failed steps. Needs a package index for torch and the packages of `present`."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        subprocess.run([python, "-m", "venv", home / "machine"], check=True)
        pip = [home / "machine/bin/python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"torch=={torch}", *(["-r", present] if present else [])], check=True)
        target = home / "unpacked"
        steps = {"unpack": f"python3 {bundle}/unpack.py {target}"}
        steps |= {name: f"source {target}/activate && {line}" for name, line in STEPS.items()}
        failed = [name for name, line in steps.items() if not done(name, line, home)]
        for kept in (target / "megatron_stppo/runs").glob("check-*"):
            shutil.copytree(kept, bundle / "rehearsed" / kept.name, dirs_exist_ok=True)
    print(f"{len(steps) - len(failed)} of {len(steps)} steps; failed: {', '.join(failed) or 'none'}")
    return len(failed)


def done(name: str, line: str, home: Path) -> bool:
    """Run a step in a namespace without a route, without the variables of this process."""
    kept = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
    environment = {
        **kept,
        "PATH": f"{home}/machine/bin:/usr/local/bin:/usr/bin:/bin",
        "CUDA_VISIBLE_DEVICES": "",
    }
    print(f"--- {name}", flush=True)
    began = time.monotonic()
    # torch.distributed needs the loopback device
    inside = ["unshare", "--net", "--map-root-user", "bash", "-c", f"ip link set lo up && {line}"]
    status = subprocess.run(inside, cwd=home, env=environment, check=False).returncode
    print(f"--- {name}: {'ok' if status == 0 else 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)
    return status == 0
