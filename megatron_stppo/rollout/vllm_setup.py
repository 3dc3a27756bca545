"""What must hold before vLLM can be built in this process, and what it is built with.

vLLM reads environment variables while it is imported, hence the order of the imports below.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_stppo.config import ConfigError
from megatron_stppo.launch.vllm_environment import SHARED_MEMORY, prepare_environment
from megatron_stppo.parallel.collectives import broadcast_bytes

prepare_environment()

import vllm  # noqa: E402
from transformers import AutoConfig, GenerationConfig, PretrainedConfig  # noqa: E402
from vllm.distributed.parallel_state import destroy_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from megatron_stppo.rollout import cpu_cache, cpu_experts  # noqa: E402
from megatron_stppo.rollout.cpu_worker import TOKEN  # noqa: E402

PINNED_VLLM = "0.32.0"


def build_vllm(
    model_path: Path | str,
    *,
    tensor: int,
    dtype: Literal["float32", "bfloat16"],
    seed: int,
    max_context: int,
    max_sequences: int,
    kv_cache_gib: float,
    gpu_memory_utilization: float,
) -> LLMEngine:
    """This rank's shard of vLLM, with undefined weights. Collective over the default process group.

    Raises ConfigError for a vLLM other than the pinned one, or a size the model or the world cannot have.
    """
    _check_version()
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    _check_sizes(config, tensor, max_context)
    if on_cpu():
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cache = max_context, _bytes_per_token(config, tensor, dtype), ranks, cpu_cache.machine_memory()
        cpu_cache.check(kv_cache_gib, *cache)
        _keep_weights_plain()
    token = broadcast_bytes(secrets.token_hex(4).encode() if dist.get_rank() == 0 else None, 0).decode()
    with warnings.catch_warnings(), _llvmlite_hidden():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # vLLM looks through all of torch, deprecated names too
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model_path),
                trust_remote_code=False,
                dtype=dtype,
                seed=seed,
                tensor_parallel_size=tensor,
                distributed_executor_backend="external_launcher",
                load_format="dummy",
                max_model_len=max_context,
                max_num_seqs=max_sequences,
                # One step may prefill several new prompts beside all running sequences.
                max_num_batched_tokens=max(8192, max_sequences, max_context if on_cpu() else 0),
                gpu_memory_utilization=gpu_memory_utilization,
                logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
                skip_tokenizer_init=True,  # ids in, ids out
                generation_config="vllm",  # no hidden top_k or temperature from the checkpoint
                enable_prefix_caching=True,  # a turn's history is already there when the next turn starts
                disable_log_stats=True,
                **_platform_arguments(kv_cache_gib, token),
            )
        )
    # All ranks have mapped the shared memory now; without a name it ends with them, even if they are killed.
    dist.barrier()
    for path in SHARED_MEMORY.glob(f"{token}-*"):
        path.unlink(missing_ok=True)
    return engine


def tear_down(engine: LLMEngine) -> None:
    """Ends an engine and the groups that it made, so that another can be built in this process. Unlike vLLM's
    own shutdown it leaves the default process group, which training uses."""
    engine.engine_core._finalizer.detach()  # it would end the default group when the engine is collected
    core = engine.engine_core.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()
    destroy_model_parallel()


@contextlib.contextmanager
def _llvmlite_hidden() -> Iterator[None]:
    """Keeps llvmlite (which numba brings, which bm25s uses where it is installed) out of vLLM's sight.

    vLLM reads the __dict__ of every global of every module; llvmlite's library handle answers any name with a
    function, that one too, and the read fails.
    """
    hidden = {name: module for name, module in sys.modules.items() if name.startswith("llvmlite.binding")}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


def on_cpu() -> bool:
    return bool(current_platform.is_cpu())


def join_world() -> None:
    """Makes the default process group if there is none, and the variables of torchrun that vLLM insists on:
    a plain process has neither, and srun sets others."""
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
    os.environ.setdefault("LOCAL_RANK", "0")


def end_of_text_ids(model_path: Path | str, config: PretrainedConfig, tokenizer: Any) -> list[int]:
    """The tokenizer's end-of-text id and those of the checkpoint (Qwen names two)."""
    given = [tokenizer.eos_token_id, config.eos_token_id]
    if (Path(model_path) / "generation_config.json").exists():
        given.append(GenerationConfig.from_pretrained(model_path).eos_token_id)
    ids: set[int] = set()
    for value in given:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(ids)


def _check_version() -> None:
    if vllm.__version__.split("+")[0] != PINNED_VLLM:
        raise ConfigError(
            f"vllm={vllm.__version__}: the engine writes into vLLM's parameters by private switches that are "
            f"tested with {PINNED_VLLM} only; install that version"
        )


def _check_sizes(config: PretrainedConfig, tensor: int, max_context: int) -> None:
    world = dist.get_world_size()
    if world % tensor:
        raise ConfigError(
            f"rollout.engine_tensor={tensor} must divide the {world} ranks; choose a divisor of {world}"
        )
    heads, positions = config.num_attention_heads, config.max_position_embeddings
    if heads % tensor:
        raise ConfigError(
            f"rollout.engine_tensor={tensor} must divide the model's num_attention_heads={heads}"
        )
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if on_cpu() and head_size not in (known := CPUAttentionBackend.get_supported_head_sizes()):
        raise ConfigError(f"model.path: its head size {head_size} cannot be served on a CPU; known: {known}")
    if on_cpu() and getattr(config, "num_experts", 0) and config.hidden_size % 32:
        raise ConfigError(
            f"model.path: experts of hidden_size={config.hidden_size} cannot be served on a CPU; "
            "a multiple of 32 can"
        )
    if max_context > positions:
        raise ConfigError(
            f"rollout.max_context={max_context} exceeds the model's max_position_embeddings={positions}; "
            "lower rollout.max_prompt_tokens, rollout.max_turn_tokens or environment.max_turns"
        )


def _bytes_per_token(config: PretrainedConfig, tensor: int, dtype: str) -> int:
    """Of the key-value cache of one rank."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = torch.finfo(getattr(torch, dtype)).bits // 8
    return 2 * config.num_hidden_layers * max(1, heads // tensor) * size * itemsize


def _keep_weights_plain() -> None:
    """vLLM re-lays linear weights out for oneDNN at load and drops the plain ones, so that writing into a
    parameter would change nothing. Two private switches keep them plain. They stay set: any later
    engine of the process needs them too. The language-model head is an embedding, hence the second. For
    experts cpu_experts.py does the same.
    """
    setattr(LinearBase, "_cpu_skip_gemm_dispatch", True)  # noqa: B010 - vLLM reads it without declaring it
    setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", _plain_head)  # noqa: B010
    cpu_experts.keep_plain()


def _plain_head(method: UnquantizedEmbeddingMethod, layer: Any) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _platform_arguments(kv_cache_gib: float, token: str) -> dict[str, Any]:
    if not on_cpu():
        # the one MoE backend that leaves the experts' weights as the reshard writes them
        return {"enable_sleep_mode": True, "moe_backend": "triton"}
    return {
        "enforce_eager": True,
        # For a prompt cut in two vLLM turns back the request's random numbers, which only a GPU's can do.
        "enable_chunked_prefill": False,
        # vLLM's 128 here would never find a short history in the prefix cache; 32 saved a fifth of the time.
        "block_size": 32,
        "kv_cache_memory_bytes": int(kv_cache_gib * 2**30),
        "worker_cls": "megatron_stppo.rollout.cpu_worker.NamedCPUWorker",
        "additional_config": {TOKEN: token},
    }
