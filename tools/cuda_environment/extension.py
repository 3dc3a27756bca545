"""Check that megatron_stppo/_csrc, built by nvcc from csrc/, can be loaded beside torch's CUDA build."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

LAUNCH_FAILED = 2  # csrc/ops.h


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "nvcc", compiler
    yield "extension", loaded
    yield "launch of a CUDA kernel", launched


def compiler() -> str:
    home = os.environ.get("CUDA_HOME")
    assert home, "CUDA_HOME is not set; make check-cuda-environment sets it"
    done = subprocess.run(
        [f"{home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    return next(line for line in done.stdout.splitlines() if "release" in line)


def loaded() -> str:
    import torch

    from megatron_stppo.ops import BucketCopy, extension

    built = extension.parts()
    assert "cuda" in built, f"built for {built or 'nothing'}: nvcc was not found"
    assert extension.serves(torch.device("cpu"))
    target = torch.zeros(1, 2, dtype=torch.bfloat16)
    BucketCopy([torch.tensor([[1.0, 2.0]])], [target])()
    assert target.tolist() == [[1.0, 2.0]], target
    return f"built for {built['cuda']}; its CPU kernels compute"


def launched() -> str:
    """Without a GPU, a launch must return the error of CUDA's runtime, which is linked into the extension."""
    import torch

    from megatron_stppo import _csrc

    slices, owners = torch.zeros(8, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    float32, on_gpu, stream = 0, True, 0
    status = _csrc.bucket_copy(
        *(slices.data_ptr(), 1, owners.data_ptr(), 1, float32, float32, on_gpu, stream)
    )
    assert status == LAUNCH_FAILED, f"status {status}"
    return "refused by CUDA's runtime: no GPU"
