"""The environment variables that vLLM reads when it is imported.

This module does not import vLLM: call `prepare_environment` before the first import of vLLM. A value that
the user has set is kept, except those of VLLM_ENABLE_V1_MULTIPROCESSING and VLLM_LOGGING_COLOR.
"""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from megatron_stppo.base.errors import Requeue
from megatron_stppo.config import ConfigError
from megatron_stppo.parallel.collectives import by_rank, gather_failures

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the sizes of adapters that its LoRA offers
SHARED_MEMORY = Path("/dev/shm")
# vLLM names its CPU all-reduce buffers "...-cpushm". A killed run leaves them behind, over 100 MB per rank.
STALE_PATTERN = "*cpushm*"
# A younger file may belong to an engine that has created it but has not mapped it yet.
STALE_AFTER_SECONDS = 60.0
MEMORY_TRIES, MEMORY_PAUSE = 31, 2.0  # a minute; pauses in seconds
log = logging.getLogger(__name__)


def padded_rank(rank: int) -> int:
    """Return the rank to which vLLM's LoRA pads adapters of this rank. Example: 8 for 2."""
    return min(size for size in LORA_RANKS if size >= rank)


def prepare_environment() -> None:
    """Set vLLM's environment variables. On a CPU, also remove the shared memory that killed runs left behind.

    - VLLM_ENABLE_V1_MULTIPROCESSING=0: the engine runs in this process, so the reshard reaches its weights.
    - VLLM_USE_FLASHINFER_SAMPLER=0: FlashInfer cannot return the log-probs of the distribution that was
      sampled from, which the engine asks for. vLLM would import it and never call it.
    - VLLM_ALLREDUCE_USE_FLASHINFER=0: FlashInfer's all-reduce has no fixed order of addition, so the ranks of
      an engine could sample different tokens. Its start has hung with several engines in one world.
    - VLLM_LOGGING_COLOR=0: colours are control characters, which logs must not contain (messages.Printable).
    - VLLM_CPU_OMP_THREADS_BIND=nobind (CPU only): engine and trainer share cores, and binding would pin both
      to one core.
    - TORCHDYNAMO_DISABLE=1 (CPU only): compiling the sampler's helpers takes seconds and gains nothing.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_LOGGING_COLOR"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    # For the time of the import, before vLLM sets up its own logging at the same level.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        remove_stale_shared_memory()


def check_cuda_functions() -> None:
    """Raise ConfigError if there is a GPU and torch.cuda.Event is not torch's own class.

    vLLM's CPU worker replaces events, streams, pinned memory and the memory query of torch, for the whole
    process. On a GPU, copies would then no longer be waited for, and vLLM would size its key-value cache from
    host memory.
    """
    owner = torch.cuda.Event.__module__
    if torch.cuda.is_available() and owner.partition(".")[0] != "torch":
        raise ConfigError(
            f"torch.cuda.Event is the stand-in of {owner}, but there is a GPU; install vLLM's build for "
            "CUDA, or hide the GPU with CUDA_VISIBLE_DEVICES="
        )


def check_variables(tensor: int) -> None:
    """Raise ConfigError for a variable with which an engine of `tensor` ranks cannot start.

    - VLLM_DISTRIBUTED_USE_SPLIT_GROUP=1 needs a default process group that is bound to a GPU. Ours is not.
    - expandable_segments:True: vLLM's all-reduce shares the buffers of CUDA graphs between processes by
      cudaIpcGetMemHandle, which refuses memory of such segments (vLLM issue 42609).
    """
    if os.environ.get("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "0") not in ("", "0"):
        raise ConfigError("VLLM_DISTRIBUTED_USE_SPLIT_GROUP: cannot be used here; unset it")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if tensor > 1 and torch.cuda.is_available() and "expandable_segments:true" in value.lower():
            raise ConfigError(
                f"{name}={value}: an engine of {tensor} ranks cannot share memory of expandable segments; "
                "unset the variable, or set rollout.engine_tensor=1"
            )


def wait_for_memory(share: float) -> None:
    """Wait until this share of every rank's GPU is free, for at most a minute. Collective.

    vLLM refuses to start otherwise. The processes of the attempt before may still be ending, and hold memory
    until they have. The wait comes before vLLM starts, because a rank that vLLM refuses leaves the others in
    vLLM's collectives. Raises Requeue on all ranks.
    """
    for number in range(MEMORY_TRIES):
        free, total = torch.cuda.mem_get_info()
        lack = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free" if free < share * total else None
        failures = gather_failures(lack, str)
        if not failures:
            return
        if lack and not number:
            log.warning("%s; waiting for other processes on this GPU to end", lack)
        time.sleep(MEMORY_PAUSE if number + 1 < MEMORY_TRIES else 0)
    raise Requeue(
        f"the engine needs rollout.gpu_memory_utilization={share} of every GPU, but after a minute: "
        f"{by_rank(failures)}; end other processes on the GPU, or lower the value"
    )


def remove_stale_shared_memory(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Delete vLLM's shared-memory files that no running process maps. Return the deleted files.

    Files of other users stay: they cannot be deleted, and what their processes map cannot be read.
    """
    deleted, mapped = [], None
    for path in folder.glob(STALE_PATTERN):
        with suppress(OSError):  # another rank has deleted it already, or it is another user's
            if time.time() - path.stat().st_mtime >= STALE_AFTER_SECONDS:
                mapped = _mapped_files(STALE_PATTERN.strip("*")) if mapped is None else mapped
                if str(path) not in mapped:
                    path.unlink()
                    deleted.append(path)
    return deleted


def _mapped_files(part: str) -> set[str]:
    """Return the paths containing `part` that any process of this machine maps, if its maps are readable."""
    paths: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(encoding="utf-8").splitlines()
        except OSError:  # the process ended, or belongs to another user, whose files we cannot delete anyway
            continue
        paths.update(line.split(maxsplit=5)[5] for line in lines if part in line)
    return paths
