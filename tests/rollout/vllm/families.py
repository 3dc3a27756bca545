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


def types(folder: Path, output: Path) -> dict[str, Any]:
    """Return A_log of trainer and engine of a model in bfloat16 before and after a step, that of a checkpoint
    and an exported folder, and the types of a gated delta net's parameters in both."""
    leave_group()
    process.prepare()
    import torch
    from safetensors.torch import load_file

    from megatron_stppo.checkpoint import loading
    from megatron_stppo.checkpoint.convert import export_hf
    from megatron_stppo.checkpoint.saving import Saver
    from megatron_stppo.config import Config
    from megatron_stppo.model import build
    from megatron_stppo.rollout.vllm.engine import Engine, EngineSettings
    from megatron_stppo.weights.reshard.resharder import Resharder
    from megatron_stppo.weights.sharding.hf_names import read_shape
    from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts, training_layouts

    actor = {"lr": 1e-4, "warmup_fraction": 0.0}
    config = Config.model_validate(
        {"model": {"path": folder, "dtype": "bfloat16"}, "update": {"actor": actor}}
    )
    mesh, shape = process.start(config), read_shape(folder)
    engine = Engine(
        EngineSettings(
            folder, dtype="bfloat16", max_context=CONTEXT, max_sequences=4, kv_cache_gib=0.05, tensor=1
        )
    )
    trainer = build.trainer("actor", shape, config, mesh, torch.bfloat16)
    own, served = build.named_parameters(trainer.chunks), engine.parameters()
    layouts = training_layouts(shape, mesh.layout)
    reshard = Resharder(own, served, layouts, serving_layouts(shape, 1, 1), row_widths(shape))
    at, there = "decoder.layers.0.self_attention.", "model.layers.0.linear_attn."
    seen: dict[str, Any] = {}

    def note(when: str) -> None:
        reshard.sync(len(seen))
        seen[f"trainer {when}"] = own[f"{at}A_log"].tolist()
        seen[f"engine {when}"] = served[f"{there}A_log"].tolist()

    note("before")
    trainer.zero()
    for buffer in trainer.gradient_buffers():
        buffer.fill_(1e-3)
    seen["stepped"] = trainer.step(trainer.reduce())
    note("after")
    saver = Saver(output, config, mesh.layout)
    saver.save(1, {"actor": trainer}, {"iteration": 1})
    saver.finish()
    loaded = build.build("actor", shape, config, mesh, torch.bfloat16)
    loading.load_weights(output, "actor", loaded, 1)
    seen["checkpoint"] = build.named_parameters(loaded)[f"{at}A_log"].tolist()
    export_hf(output / "hf", own, layouts, shape, folder)
    seen["folder"] = load_file(output / "hf/model.safetensors")[f"{there}A_log"].tolist()
    names = ("A_log", "dt_bias", "norm.weight")
    seen["types"] = [[str(own[at + name].dtype), str(served[there + name].dtype)] for name in names]
    return seen
