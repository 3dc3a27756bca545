"""One process with one engine for all tests of a single rank, because vLLM takes seconds to start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist


def observe(folder: Path) -> dict[str, Any]:
    """Return {module: observations} for test_engine, test_in_flight and test_collect."""
    # A process without torchrun, as `python -m megatron_stppo` starts it: no group and no variables.
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    from megatron_stppo.rollout.vllm.engine import Engine, EngineSettings
    from tests.rollout.episodes import test_collect
    from tests.rollout.vllm import test_engine, test_in_flight
    from tests.rollout.vllm.tiny import CONTEXT

    engine = Engine(EngineSettings(folder, max_context=CONTEXT, max_sequences=48, kv_cache_gib=0.05))
    return {
        "engine": test_engine.observe(engine, folder),
        "in flight": test_in_flight.observe(engine, folder),
        "collect": test_collect.observe(engine, folder),
    }
