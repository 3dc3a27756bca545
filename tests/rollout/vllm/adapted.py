"""Functions that run on a rank: a trainer's adapters go into vLLM, which applies them itself."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_stppo.cluster.launch import process
from tests.ranks import leave_group
from tests.rollout.vllm.families import PROMPTS
from tests.rollout.vllm.tiny import CONTEXT


def observe(
    folder: Path, parallel: dict[str, int], engine_tensor: int, lora: dict[str, Any]
) -> dict[str, Any]:
    """Return generations of version 0, in which B is zero, of version 1, whose A and B are those of `values`,
    of version 1 again in an engine that was replaced, and once more after this engine has lost the content of
    its memory. They are equal on the ranks of an engine."""
    leave_group()
    process.prepare()
    from typing import get_args

    import torch
    from vllm.config.lora import MaxLoRARanks
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.platforms.interface import UnspecifiedPlatform

    from megatron_stppo.config import Config, ConfigError
    from megatron_stppo.model import build
    from megatron_stppo.model.learner import build_learner
    from megatron_stppo.rollout.vllm.engine_adapters import lora_arguments
    from megatron_stppo.training.colocated import build_engine, engine_sync
    from megatron_stppo.weights.sharding.hf_names import read_shape
    from megatron_stppo.weights.sharding.low_rank import ServedAdapters, fill

    rollout = {"engine_tensor": engine_tensor, "max_context": CONTEXT, "max_sequences": 16}
    given = {"model": {"path": folder, "lora": lora}, "parallel": parallel}
    config = Config.model_validate(given | {"rollout": rollout | {"kv_cache_gib": 0.05}})
    mesh, shape = process.start(config), read_shape(folder)
    engine = build_engine(config, torch.float32, routes=False)
    learner = build_learner(config, shape, mesh, torch.float32, training=False)
    sync, seen = engine_sync(learner, engine), dict[str, Any]()
    group = get_tp_group().cpu_group._get_backend(torch.device("cpu"))
    seen["timeouts"] = group.options._timeout, config.timeout
    seen["vLLM's ranks"] = get_args(MaxLoRARanks)
    try:
        lora_arguments(ServedAdapters(4, ("q_proj",), alone=True), UnspecifiedPlatform())
    except ConfigError as error:
        seen["no LoRA"] = str(error)
    parameters, of_version_1 = build.named_parameters(learner.policy), values(folder, lora)
    for turn, version in enumerate((0, 1, 1, 1)):
        sync.sync(version)
        engine.wake()
        engine.refresh()
        if turn == 3:
            seen["slots"] = slots_of_a_step(engine)
        for number, prompt in enumerate(PROMPTS):
            engine.add(str(number), prompt, seed=number, max_tokens=24)
        while engine.unfinished:
            for done in engine.step():
                seen[f"{turn} {done.request_id}"] = done.token_ids, done.logprobs
        if turn == 1:
            watch_for_the_old_model(engine, seen)
            engine.rebuild()
            sync = engine_sync(learner, engine)
        if turn == 2:
            lose_memory(engine)
            sync.forget()
        for name, spans in build.adapters_of_rank(shape, config, mesh.layout, mesh.rank).items():
            fill(parameters[name], spans, of_version_1.__getitem__)
    return seen


def watch_for_the_old_model(engine: Any, seen: dict[str, Any]) -> None:
    """Have the next build of vLLM note first whether the model that the engine has now is freed."""
    old = weakref.ref(engine._llm.model_executor.driver_worker.worker.get_model())
    start = engine._start

    def noted() -> None:
        seen["old model is freed"] = old() is None
        start()

    engine._start = noted


def lose_memory(engine: Any) -> None:
    """Have the engine sleep, and wake its weights with undefined content, as on a GPU.

    No GPU is here: two functions stand in for its memory, and all tensors that vLLM makes while it loads a
    model get other content.
    """
    from megatron_stppo.rollout.vllm import engine as module

    slots_of_a_step(engine)
    engine.sleep()
    manager = engine._adapters._manager
    for holder in (*manager.modules.values(), *manager.punica_wrapper_mapping.values()):
        for held in vars(holder).values():
            for tensor in held if isinstance(held, tuple) else (held,):
                spoil(tensor)
    for weight in engine.parameters().values():
        spoil(weight)
    with (
        mock.patch.object(module, "on_cpu", lambda: False),
        mock.patch.object(engine._core, "wake_up", lambda parts: None),
    ):
        assert engine.wake_weights(), "the content is undefined"


def slots_of_a_step(engine: Any) -> list[int]:
    """Compute one token for the first prompt. Return the adapter's slot for each token of the prompt.

    vLLM's kernels for a GPU read the slots. They are written only if they differ from those of the last step.
    """
    engine.add("one", PROMPTS[0], seed=0, max_tokens=1)
    while engine.unfinished:
        engine.step()
    (wrapper,) = engine._adapters._manager.punica_wrapper_mapping.values()
    return list(wrapper.token_lora_indices.tolist())


def spoil(tensor: Any) -> None:
    """Fill a tensor with NaN, or with -1 if it has integers. Anything else is left as it is."""
    import torch

    if isinstance(tensor, torch.Tensor):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def values(folder: Path, lora: dict[str, Any]) -> dict[str, Any]:
    """Return {checkpoint name: A or B} of version 1."""
    from megatron_stppo.config import LoraConfig
    from megatron_stppo.model.adapters import uniform
    from megatron_stppo.weights.sharding.hf_names import read_shape
    from megatron_stppo.weights.sharding.low_rank import adapter_shapes

    given = LoraConfig.model_validate(lora)
    return {
        key: uniform(size, key)
        for key, size in adapter_shapes(read_shape(folder), given.rank, given.names).items()
    }
