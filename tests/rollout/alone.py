"""One process with one engine, for everything that a single rank can show: starting vLLM costs seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist


def observe(folder: Path) -> dict[str, Any]:
    """What test_engine and test_collect make claims about, by the name of the module."""
    # A plain process, as `python -m megatron_stppo` without torchrun: no group, no variables.
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    from megatron_stppo.rollout.engine import Engine
    from tests.rollout import test_collect, test_engine
    from tests.rollout.tiny import CONTEXT

    engine = Engine(folder, max_context=CONTEXT, max_sequences=48, kv_cache_gib=0.05)
    return {"engine": test_engine.observe(engine, folder), "collect": test_collect.observe(engine, folder)}
