"""Start this process as a rank: set the environment, import in the right order, create the process groups.

The imports in this file are inside functions on purpose. On a CPU, vLLM must be imported before torch.cuda is
replaced, and megatron after that.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import importlib.util
import locale
import logging
import os
import random
import re
import socket
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.base.printing import Printable, say
from megatron_stppo.cluster.launch import connections, doctor, slurm
from megatron_stppo.cluster.preemption import ends_at_sigterm

if TYPE_CHECKING:
    import torch

    from megatron_stppo.config import Config
    from megatron_stppo.model import fusions
    from megatron_stppo.parallel.groups import MeshRank

LINE = "%(asctime)s %(name)s %(levelname)s %(message)s"  # of a log
# Warnings that a user cannot act on, by the module that they are attributed to, with those inside it.
IGNORED: dict[str, tuple[type[Warning], ...]] = {
    "megatron": (UserWarning, FutureWarning, DeprecationWarning),  # packages that are optional here
    "vllm": (UserWarning, FutureWarning, DeprecationWarning),
    "torch.distributed": (FutureWarning,),  # megatron calls functions that have new names
}


def discover() -> None:
    """Set torchrun's environment variables from those of srun, if srun started this process.

    Call it once per process, before everything else. Raises ConfigError.
    """
    os.environ.update(slurm.torchrun_variables(os.environ))


def set_ranks() -> None:
    """Make a process without a launcher the only rank: set the variables that torchrun would set."""
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()
        )


def threads(processes: int) -> int:
    """Return the threads for each of `processes` on this machine: a share of its cores, but no more than the
    cores that this process is bound to, by Slurm for example.

    Example: 8 processes on 64 cores have 8 threads each, and 4 if each is bound to 4 cores.
    """
    return min(max(1, (os.cpu_count() or 1) // processes), len(os.sched_getaffinity(0)))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def ranks_per_node() -> int:
    """Return the number of ranks of a node, the largest one if nodes differ. Collective."""
    import torch

    from megatron_stppo.parallel.collectives import all_reduce_max

    return int(all_reduce_max(torch.tensor([int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))])))


@functools.cache
def prepare(engine: bool = True, device: str = "cpu") -> None:
    """Set up what must be in place before megatron is imported.

    A second call with the same arguments does nothing. `engine=False` does not import vLLM. device="meta" is
    for a dry run, in which no GPU may be visible. Raises ConfigError for a locale without UTF-8, and for a
    driver with which torch sees no GPU.
    """
    encoding = codecs.lookup(locale.getencoding()).name
    if encoding != "utf-8" and not sys.flags.utf8_mode:  # torch reads its own sources in this encoding
        raise ConfigError(f"the locale's encoding is {encoding}: set PYTHONUTF8=1, or LC_ALL=C.UTF-8")
    if device == "cpu" and not _has_gpu() and (problem := doctor.driver_problem()):
        raise ConfigError(problem)  # else the run would train on the CPU
    logging.basicConfig(level=logging.WARNING, format=LINE)
    _print_safely(logging.getLogger())
    _ignore_warnings()
    if not _has_gpu():
        # megatron and vLLM compile small functions; on a CPU that costs minutes and gains nothing
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it warns that triton is missing
    else:
        check_transformer_engine()
    if engine:
        from megatron_stppo.cluster.launch.vllm_environment import prepare_environment

        prepare_environment()
        import vllm
        import vllm.v1.engine.core
        import vllm.v1.worker.gpu_model_runner
        import vllm.v1.worker.gpu_worker  # noqa: F401

        _print_safely(logging.getLogger("vllm"))
    from megatron_stppo.ops.products import stand_in_for_apex
    from megatron_stppo.parallel import cpu_platform

    stand_in_for_apex()
    if cpu_platform.needed():
        cpu_platform.install(device)


def _print_safely(logger: logging.Logger) -> None:
    """Make what the logger prints safe for a terminal: it may quote text of the model or of a tool."""
    for handler in logger.handlers:
        handler.setFormatter(Printable(handler.formatter or logging.Formatter()))


def check_transformer_engine() -> None:
    """Raise ConfigError if TransformerEngine is installed, but its libraries cannot be loaded.

    megatron imports it whatever model.layers is, and would end with the loader's traceback.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        importlib.import_module("transformer_engine")
    except OSError as error:
        raise ConfigError(
            f"TransformerEngine is installed, but its libraries cannot be loaded: {error}; put the folders "
            "of the cuDNN and cuBLAS that torch was installed with first in LD_LIBRARY_PATH, or uninstall "
            "transformer-engine"
        ) from error


def _ignore_warnings() -> None:
    """Ignore the warnings of these libraries about themselves. Those of all other modules are shown."""
    for module, categories in IGNORED.items():
        for category in categories:
            warnings.filterwarnings("ignore", category=category, module=rf"{re.escape(module)}(\.|$)")


def check(config: Config) -> None:
    """Check the parts of the configuration that need torch and megatron to be imported.

    All ranks get the same result. Raises ConfigError.
    """
    from megatron_stppo.model import fusions
    from megatron_stppo.model.layers import layers_of
    from megatron_stppo.weights.sharding.hf_names import read_shape

    layers_of(read_shape(config.model.path), config, dtype(config))
    fusions.check(_place(config), config.megatron)
    if config.telemetry.nvtx and not _has_gpu():
        raise ConfigError("telemetry.nvtx=true: NVTX ranges need a GPU; set it to false")


def _place(config: Config) -> fusions.Place:
    """Return what decides about megatron's fused kernels in this run."""
    from megatron_stppo.model import fusions
    from megatron_stppo.weights.sharding.hf_names import read_shape

    return fusions.Place.of(config, read_shape(config.model.path), _has_gpu())


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def start(config: Config, is_alone: bool = True) -> MeshRank:
    """Join the default process group, build megatron's groups, and return this rank's place in them.

    is_alone: see `meeting` in cluster/launch/rendezvous.py.
    """
    import torch

    from megatron_stppo.parallel import groups
    from megatron_stppo.weights.sharding.hf_names import read_shape

    check(config)
    join(config.timeout, is_alone, config.serving.replicas or 0, config.engine_tensor)
    with ends_at_sigterm():
        mesh = groups.initialize(config.parallel, config.timeout)
        if _has_gpu():  # before the engine and the models take memory
            shape = read_shape(config.model.path)
            found = groups.exchanges(mesh, config, shape.experts > 0, shape.tied)
            groups.connect(found, torch.device("cuda", torch.cuda.current_device()))
    if mesh.rank == 0:
        say(_opening(config, mesh))
    return mesh


def join(timeout: timedelta, is_alone: bool = True, replicas: int = 0, tensor: int = 1) -> None:
    """Join the default process group. A process without a launcher becomes a world of one rank.

    is_alone: see `meeting`, replicas, tensor: see `files_needed`, in cluster/launch/rendezvous.py.
    """
    import torch
    import torch.distributed as dist

    from megatron_stppo.cluster.launch.rendezvous import meeting, raise_file_limit

    set_ranks()
    cuda = torch.cuda.is_available()
    if cuda and world_size() > 1:  # also of replicas: NCCL reads it once, at the first communicator
        os.environ.setdefault(connections.NVLS, "0")
    raise_file_limit(world_size(), replicas, tensor)
    if slurm.started_by_srun(os.environ):  # srun keeps a log per rank
        say(slurm.logged_variables(os.environ))
    slurm.check_gpus(os.environ, cuda)
    if cuda:
        torch.cuda.set_device(device_index())
        if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it to 1
            torch.set_num_threads(1)  # starting threads for small tensors takes longer than the GPU's work
    elif world_size() > 1:
        torch.set_num_threads(threads(int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))))
    # A GPU run needs both backends: megatron exchanges tensors on the GPU, the engine and the checkpoints
    # exchange data on the host.
    backends = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    with ends_at_sigterm():
        dist.init_process_group(backends, **meeting(timeout, is_alone=is_alone))


def _opening(config: Config, mesh: MeshRank) -> str:
    """Return one line: layout, algorithm, device, dtype, kernels, and missing optional packages."""
    import torch
    from megatron.core.optimizer import Adam

    from megatron_stppo.model import fusions
    from megatron_stppo.model.layers import layer_spec
    from megatron_stppo.model.pipeline import sharing_obstacle
    from megatron_stppo.ops import extension

    gpu, layout = torch.cuda.is_available(), mesh.layout
    axes = {
        name: getattr(layout, name) for name in ("tensor", "context", "expert", "pipeline", "virtual", "data")
    }
    obstacle = sharing_obstacle(config, layout)
    shared = ", ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    parts = [
        f"{mesh.world} ranks ({shared})" if shared else "1 rank",
        config.algorithm.named(),
        f"{torch.cuda.get_device_name()}, nccl" if gpu else "no GPU: gloo, the CPU in place of torch.cuda",
        str(dtype(config)).removeprefix("torch."),
        f"{layer_spec(config)} layers",
        f"prefixes not shared ({obstacle})" if obstacle else "prefixes shared",
        f"ops in {'csrc' if extension.serves(torch.device('cuda' if gpu else 'cpu')) else 'plain torch'}",
        *([fusions.summary(_place(config), config.megatron)] if gpu else []),
        *([f"{Adam.__name__} of {Adam.__module__.partition('.')[0]}"] if gpu else []),
        *([f"{connections.NVLS}={os.environ[connections.NVLS]}"] if connections.NVLS in os.environ else []),
        *(f"without {name}: {cost}" for name, cost in doctor.missing() if gpu),
    ]
    return "; ".join(parts)


def log_to(folder: Path, rank: int, prefix: str = "") -> None:
    """Write this rank's warnings and errors to folder/logs/rank-N.log too; `prefix` precedes the name."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    handler = _OnDisk(folder / "logs" / f"{prefix}rank-{rank}.log", encoding="utf-8")
    handler.setFormatter(Printable(logging.Formatter(LINE)))
    logging.getLogger().addHandler(handler)


class _OnDisk(logging.FileHandler):
    """A log that is silent when its disk is full. Its lines are on stderr too."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def dtype(config: Config) -> torch.dtype:
    """Return the dtype of the model: model.dtype, or for "auto" bfloat16 on a GPU and float32 on a CPU.

    Raises ConfigError for float32 on a GPU.
    """
    import torch

    name = config.model.dtype
    if name == "auto":
        name = "bfloat16" if torch.cuda.is_available() else "float32"
    if name == "float32" and torch.cuda.is_available():
        raise ConfigError("model.dtype=float32: packed attention on CUDA needs bfloat16; choose auto")
    return getattr(torch, name)


def gpu_failed() -> bool:
    """Return whether this rank's GPU no longer works. After an illegal address every call of CUDA fails."""
    import torch

    try:
        torch.cuda.synchronize()  # does nothing on a CPU (parallel/cpu_platform.py)
    except RuntimeError:
        return True
    return False


def stop() -> None:
    """Wait for all ranks and destroy the process groups, if they still exist."""
    import torch.distributed as dist

    if dist.is_initialized():  # closing the engine destroys the groups too
        dist.barrier()
        dist.destroy_process_group()


def device_index() -> int:
    """Return the index of this rank's GPU. Raises ConfigError if its node has more ranks than GPUs."""
    import torch

    local, seen = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    ranks = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if ranks > seen:  # raised on every rank of the node; the first one prints it
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={ranks}, but this process sees {seen} GPUs; start at most one "
            "rank per GPU, and make all GPUs visible to every rank (srun without --gpus-per-task and "
            "--gpu-bind)"
        )
    return local


def free_port() -> str:
    """Return a port of the loopback interface on which nobody listens now.

    It is below the ephemeral ports of Linux: the system could give one of those to another connection before
    the caller listens.
    """
    draw = random.SystemRandom()  # processes with the same seed must not draw the same ports
    while True:
        port = draw.randrange(20_000, 32_768)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return str(port)
