"""The environment variables CUDA_DEVICE_MAX_CONNECTIONS and NCCL_NVLS_ENABLE, which CUDA and NCCL read once,
when CUDA is initialised and when the first communicator is made.

megatron starts a collective of the tensor parallel ranks and then a matrix product that runs beside it ("we
rely on CUDA_DEVICE_MAX_CONNECTIONS=1" in megatron/core/tensor_parallel/layers.py 0.16.1). With 1, a GPU
before Blackwell begins with the kernel that was started first, the collective. With more, the product may
begin first and occupy the GPU until it ends, and the collective is not hidden behind it. Megatron-LM requires
1 for tensor and context parallelism on these GPUs, no longer on Blackwell (megatron/training/arguments.py).

With NVLS, switches of NVLink add up what the GPUs of a node send. Equal numbers may then have another sum in
the next call (NVIDIA/nccl, issue 1497), so that scoring and update would compute different log-probs under
tensor parallelism, and a repeated run other gradients. A communicator also takes 256 MiB more on 8 GPUs
(ncclNvlsBufferSetup in src/transport/nvls.cc). So process.join sets 0, unless a value is set.
This module imports neither torch nor megatron.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_stppo.config import ParallelConfig

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
NVLS = "NCCL_NVLS_ENABLE"
BLACKWELL = 10  # major number of its compute capability


def gpu_generations() -> list[int]:
    """Return the major compute capability of each GPU that this process may use. It does not initialise CUDA.

    NVML also counts GPUs of a shared node that the scheduler gave to other jobs; these are left out.
    """
    pynvml = importlib.import_module("pynvml")  # a quarter of a second, which --help need not wait for
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # without a driver
        return []
    generations = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        with contextlib.suppress(pynvml.NVMLError):  # no permission, or the GPU is lost
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            generations.append(pynvml.nvmlDeviceGetCudaComputeCapability(device)[0])
    pynvml.nvmlShutdown()
    return generations


def keep_order(
    environment: MutableMapping[str, str], parallel: ParallelConfig, generations: Sequence[int]
) -> str | None:
    """Set the variable to 1 where the run needs it. A value that is already set is kept.

    Call it before CUDA is initialised. Return a warning if the value that is set is another one than 1.
    Example: parallel.tensor=2 on a GPU with capability (9, 0) sets CUDA_DEVICE_MAX_CONNECTIONS=1.
    """
    axes = {"tensor": parallel.tensor, "context": parallel.context}
    split = [f"parallel.{name}={size}" for name, size in axes.items() if size > 1]
    if not split or not any(generation < BLACKWELL for generation in generations):
        return None
    value = environment.setdefault(NAME, "1")
    if value == "1":
        return None
    return (
        f"{NAME}={value}: with {' and '.join(split)} collectives may wait for matrix products instead of "
        f"running beside them; unset it, or set it to 1"
    )
