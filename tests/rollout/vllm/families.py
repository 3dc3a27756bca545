"""Functions that run on a rank: a checkpoint is loaded into megatron's shards and resharded into vLLM, whose
log-probs are returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stppo.cluster.launch import process
from tests.ranks import leave_group
from tests.rollout.vllm.tiny import CONTEXT

PROMPTS = [tuple(range(5 + i, 25 + 3 * i)) for i in range(3)]


def observe(folder: Path, parallel: dict[str, int], engine_tensor: int) -> dict[str, Any]:
    """Return generations with weights from the reshard. They are equal on the ranks of a replica."""
    leave_group()
    process.prepare()
    import torch

    from megatron_stppo.config import Config
    from megatron_stppo.model import build
    from megatron_stppo.rollout.vllm.engine import Engine, EngineSettings
    from megatron_stppo.weights.reshard.resharder import Resharder
    from megatron_stppo.weights.sharding.hf_names import read_shape
    from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts, training_layouts

    config = Config.model_validate({"model": {"path": folder}, "parallel": parallel})
    mesh, shape = process.start(config), read_shape(folder)
    engine = Engine(
        EngineSettings(folder, tensor=engine_tensor, max_context=CONTEXT, max_sequences=16, kv_cache_gib=0.05)
    )
    policy = build.from_hf("actor", shape, config, mesh, torch.float32)
    reshard = Resharder(
        build.named_parameters(policy),
        engine.parameters(),
        training_layouts(shape, mesh.layout),
        serving_layouts(shape, mesh.world, engine_tensor),
        row_widths(shape),
    )
    reshard.sync(1)
    engine.published = reshard.published
    engine.refresh()
    for number, prompt in enumerate(PROMPTS):
        engine.add(str(number), prompt, seed=number, max_tokens=24)
    finished = {}
    while engine.unfinished:
        finished.update((done.request_id, done) for done in engine.step())
    return {name: (done.token_ids, done.logprobs) for name, done in finished.items()}
