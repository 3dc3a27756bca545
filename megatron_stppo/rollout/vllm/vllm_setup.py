"""Construction of vLLM in this process: checks before it, and the arguments.

vLLM reads environment variables while it is imported. They are therefore set before the imports of vLLM
below.
"""

import contextlib
import gc
import importlib
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_stppo.base.errors import Requeue
from megatron_stppo.cluster.launch.doctor import TESTED_ENGINES
from megatron_stppo.cluster.launch.vllm_environment import (
    SHARED_MEMORY,
    check_cuda_functions,
    check_variables,
    prepare_environment,
    wait_for_memory,
)
from megatron_stppo.config import ConfigError
from megatron_stppo.parallel.collectives import broadcast_bytes

prepare_environment()

import vllm  # noqa: E402
from transformers import PretrainedConfig  # noqa: E402
from vllm.distributed.parallel_state import destroy_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from megatron_stppo.rollout.vllm.engine_adapters import lora_arguments  # noqa: E402
from megatron_stppo.weights.sharding.hf_load import load_generation  # noqa: E402
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape  # noqa: E402
from megatron_stppo.weights.sharding.low_rank import ServedAdapters  # noqa: E402
from megatron_stppo.weights.sharding.spans import STACKS  # noqa: E402

if current_platform.is_cpu():  # vLLM's CPU worker replaces functions of torch.cuda while it is imported
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from megatron_stppo.rollout.vllm import cpu

GPU_WORKER = "megatron_stppo.rollout.vllm.gpu_worker."
GIB = 2**30
# files that hold the memory limit of a container (cgroup v2, v1)
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built with. validation/ has checked that the sizes fit the model and the ranks.

    Example: EngineSettings(Path("model"), tensor=2, max_context=8192).
    """

    model_path: Path
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # of its chat template
    tensor: int = 1  # ranks of an engine
    dtype: Literal["float32", "bfloat16"] = "float32"
    float32_logits: bool = False  # also with bfloat16
    seed: int = 0
    max_context: int = 4096  # tokens of a trajectory
    max_sequences: int = 256  # at a time
    kv_cache_gib: float = 1.0  # on a CPU
    gpu_memory_utilization: float = 0.6
    timeout: timedelta = timedelta(minutes=30)  # of vLLM's process groups; in the key of its compile cache
    routes: bool = False  # the worker records the experts that its routers choose (engine_routes.py)
    adapters: ServedAdapters | None = None  # A and B that vLLM applies itself (engine_adapters.py)
    options: Mapping[str, Any] = field(default_factory=dict)  # rollout.vllm, further arguments of vLLM

    @property
    def bytes_per_token(self) -> int:
        """The bytes that a token takes in the key-value cache of one rank."""
        shape = read_shape(self.model_path)
        itemsize = torch.finfo(getattr(torch, self.dtype)).bits // 8
        return itemsize * sum(mixer.cached(self.tensor) for mixer in shape.mixers)


def build_vllm(settings: EngineSettings) -> LLMEngine:
    """Build this rank's shard of vLLM, with undefined weights. Collective over the default process group.

    Raises ConfigError if vLLM does not have a tested version or no LoRA for the adapters, if torch.cuda was
    replaced on a GPU, if check_variables refuses a variable, if a CPU cannot serve the model, or if vLLM
    refuses the sizes or options; Requeue if another process holds the GPU's memory for more than a minute.
    """
    _check_version()
    check_cuda_functions()
    check_variables(settings.tensor)
    if on_cpu():
        if "kv_cache_memory_bytes" in settings.options:
            raise ConfigError(
                "rollout.vllm.kv_cache_memory_bytes: is for a GPU; on a CPU give rollout.kv_cache_gib instead"
            )
        _check_on_cpu(read_shape(settings.model_path), settings.tensor)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        check_cpu_cache(
            settings.kv_cache_gib, settings.max_context, settings.bytes_per_token, ranks, machine_memory()
        )
        # Writing into a parameter takes effect in the plain layout only. It stays for later engines.
        cpu.plain_linears()
        cpu.one_adapter()
    else:
        wait_for_memory(settings.gpu_memory_utilization)
    token = broadcast_bytes(secrets.token_hex(4).encode() if dist.get_rank() == 0 else None, 0).decode()
    with warnings.catch_warnings(), _llvmlite_hidden():
        # vLLM inspects all names of torch, including deprecated ones
        warnings.simplefilter("ignore", FutureWarning)
        try:
            engine = LLMEngine.from_engine_args(engine_arguments(settings, token))
        except ValueError as error:  # vLLM's own message says what does not fit
            own = f", rollout.vllm={dict(settings.options)}" if settings.options else ""
            # After wait_for_memory, a process has taken or still holds memory, which may be free next time.
            kind = Requeue if str(error).startswith("Free memory on device") else ConfigError
            raise kind(
                f"vLLM cannot be built with rollout.gpu_memory_utilization="
                f"{settings.gpu_memory_utilization}, rollout.max_sequences={settings.max_sequences}{own} "
                f"and a context of {settings.max_context} tokens: {error}"
            ) from error
    # All ranks have mapped the shared memory. Once its name is removed, the kernel frees it when the
    # processes end, even if they are killed.
    dist.barrier()
    for path in SHARED_MEMORY.glob(f"{token}-*"):
        path.unlink(missing_ok=True)
    return engine


def engine_arguments(settings: EngineSettings, token: str) -> EngineArgs:
    """Return vLLM's arguments for this platform.

    token: part of the name of the shared memory on a CPU; equal on the ranks of this engine, and different
    from those of all other engines.
    """
    seconds = int(settings.timeout.total_seconds())
    shape = read_shape(settings.model_path)
    # config.json may have none, or that of a model with images
    overrides: dict[str, Any] = {"architectures": [shape.architecture]}
    if settings.float32_logits and settings.dtype != "float32":
        overrides["head_dtype"] = "float32"
    fixed: dict[str, Any] = {
        "model": str(settings.model_path),
        "trust_remote_code": False,
        "dtype": settings.dtype,
        "hf_overrides": overrides,
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor,
        "distributed_executor_backend": "external_launcher",
        "load_format": "dummy",
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.max_sequences,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "skip_tokenizer_init": True,  # input and output are token ids
        "generation_config": "vllm",  # ignore top_k and temperature of the checkpoint
        "disable_log_stats": True,
        "distributed_timeout_seconds": seconds,
        "cpu_distributed_timeout_seconds": seconds,
    }
    chosen: dict[str, Any] = {  # rollout.vllm may replace these
        # In one step several new prompts can be prefilled beside all running sequences.
        "max_num_batched_tokens": max(8192, settings.max_sequences, settings.max_context if on_cpu() else 0),
        # The next turn reuses the key-value cache of the turns before. vLLM keeps the states of recurrent
        # layers at the ends of blocks of 528 tokens and more, and its CPU worker fails with seeded requests.
        "enable_prefix_caching": not shape.recurrent_layers,
        # With vLLM's default of 128, a short history is never found in the prefix cache of a CPU. 32 saved a
        # fifth of the time.
        **({"block_size": 32} if on_cpu() and not shape.recurrent_layers else {}),
    }
    compilation = dict(settings.options.get("compilation_config", {}))
    # It calls FlashInfer's all-reduce, which prepare_environment switches off.
    compilation["pass_config"] = {"fuse_allreduce_rms": False} | compilation.get("pass_config", {})
    options = {**settings.options, "compilation_config": compilation}
    platform = _platform_arguments(settings.kv_cache_gib, token, settings.routes)
    if shape.gpu_attention and not on_cpu():
        platform["attention_backend"] = attention_backend(shape.gpu_attention)
    return EngineArgs(**(chosen | options | fixed | platform | lora_arguments(settings.adapters)))


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of one of vLLM's models by name. They share memory with the model.

    Stacked experts are returned one by one: "...w13_weight.3" is a view of the fourth expert.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        experts = name.rpartition(".")[2] in STACKS
        slices = parameter.data.unbind() if experts else ()
        plain = name.replace(".base_layer.", ".")  # vLLM puts a layer into one that applies adapters
        tensors |= {f"{plain}.{n}": part for n, part in enumerate(slices)} or {plain: parameter.data}
    return tensors


def tear_down(engine: LLMEngine) -> None:
    """Shut down an engine and the process groups that it made, so that this process can build another one.

    Unlike vLLM's own shutdown, it keeps the default process group, which training uses.
    """
    client: Any = engine.engine_core  # the client of an engine in this process
    if hasattr(client, "_finalizer"):  # not in 0.26
        client._finalizer.detach()  # it would destroy the default group on garbage collection
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()
    destroy_model_parallel()


@contextlib.contextmanager
def _llvmlite_hidden() -> Iterator[None]:
    """Remove llvmlite from sys.modules inside the context.

    llvmlite is installed with numba, which bm25s uses if it is installed. vLLM reads the __dict__ of every
    global of every module. llvmlite's library handle returns a function for every attribute name, __dict__
    included, and vLLM fails on it.
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
    """Make the default process group if there is none, and set the variables of torchrun that vLLM requires.

    A plain process has neither, and srun sets other variables.
    """
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
    os.environ.setdefault("LOCAL_RANK", "0")


def end_of_text_ids(model_path: Path | str, config: PretrainedConfig, tokenizer: Any) -> list[int]:
    """Return the end-of-text ids of the tokenizer and of the checkpoint, sorted."""
    values = [tokenizer.eos_token_id, config.eos_token_id]
    if (generation := load_generation(Path(model_path))) is not None:
        values.append(generation.eos_token_id)
    ids: set[int] = set()
    for value in values:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(ids)


def _check_version() -> None:
    if vllm.__version__.split("+")[0] not in TESTED_ENGINES:
        raise ConfigError(
            f"vllm={vllm.__version__}: the engine writes into vLLM's parameters with private switches, which "
            f"are tested with {' and '.join(TESTED_ENGINES)} only; install one of them"
        )


def _check_on_cpu(shape: ModelShape, tensor: int) -> None:
    """Raise ConfigError for a model that vLLM cannot serve on a CPU. Prepare its layers otherwise."""
    known = CPUAttentionBackend.get_supported_head_sizes()
    if shape.head_dim not in known:
        raise ConfigError(
            f"model.path: its head size {shape.head_dim} cannot be served on a CPU; choose a model with one "
            f"of {known}"
        )
    try:  # vLLM 0.26 does not have what these replace, and other models do not need it
        if shape.experts:
            cpu.plain_experts()
        engine = importlib.import_module(shape.cpu_engine) if shape.cpu_engine else None
    except (AttributeError, ImportError):
        raise ConfigError(
            f"vllm={vllm.__version__}: it cannot serve a model of model_type={shape.family} on a CPU from "
            f"weights that are written in place; install {next(iter(TESTED_ENGINES))}"
        ) from None
    if engine is not None:
        engine.prepare()
    if reason := shape.cpu_obstacle(tensor):
        raise ConfigError(
            f"model.path: {reason} cannot be served on a CPU; choose a model with multiples of 32 on a rank"
        )


def check_cpu_cache(gib: float, max_context: int, bytes_per_token: int, ranks: int, memory: int) -> None:
    """Raise ConfigError unless a cache of `gib` GiB per rank holds one trajectory and fits in memory.

    `ranks` processes share this machine's `memory`, in bytes. A trajectory has up to `max_context` tokens.
    """
    least, most = max_context * bytes_per_token / GIB, memory / GIB / ranks
    if gib > most:
        raise ConfigError(
            f"rollout.kv_cache_gib={gib:g}: {ranks} ranks share {memory / GIB:.1f} GiB of memory, which "
            f"must also hold weights and optimizer; choose at most {most / 2:.2g}"
        )
    if gib < least:
        raise ConfigError(
            f"rollout.kv_cache_gib={gib:g}: one trajectory of {max_context} tokens takes {least:.2g} GiB; "
            "choose more, or lower rollout.max_context"
        )


def machine_memory() -> int:
    """Return the memory of this machine, or the limit of this container if it is lower, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in filter(Path.is_file, map(Path, LIMITS)):
        text = path.read_text(encoding="utf-8").strip()
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def attention_backend(choices: tuple[str, str]) -> str:
    """Return ModelShape.gpu_attention of this GPU: a backend that reads what the reshard writes, in place."""
    return choices[torch.cuda.get_device_capability()[0] != 9]


def _platform_arguments(kv_cache_gib: float, token: str, routes: bool) -> dict[str, Any]:
    if not on_cpu():
        return {
            "enable_sleep_mode": True,
            # the only MoE backend that keeps the experts' weights in the layout that the reshard writes
            "moe_backend": "triton",
            # vLLM begins a step before it returns the tokens of the step before (see Engine.add and _drain)
            "async_scheduling": True,
            "worker_cls": GPU_WORKER + ("RecordingWorker" if routes else "SharingWorker"),
        }
    return {
        "async_scheduling": False,  # vLLM sets it to False on a CPU
        "enforce_eager": True,
        # For a prompt prefilled in two chunks vLLM rewinds the request's random generator; only CUDA's can.
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": int(kv_cache_gib * GIB),
        "worker_cls": "megatron_stppo.rollout.vllm.cpu.NamedCPUWorker",
        "additional_config": {cpu.TOKEN: token, cpu.ROUTES: routes},
    }
