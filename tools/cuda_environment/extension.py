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
    done = subprocess.run([f"{home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True)
    return next(line for line in done.stdout.splitlines() if "release" in line)


def loaded() -> str:
    import torch

    from megatron_stppo.ops import extension, gae

    built = extension.parts()
    assert "cuda" in built, f"built for {built or 'nothing'}: nvcc was not found"
    assert extension.serves(torch.device("cpu"))
    _, returns = gae(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3), torch.tensor([0, 3]))
    assert returns.tolist() == [7.0, 6.0, 4.0], returns
    return f"built for {built['cuda']}; its CPU kernels compute"


def launched() -> str:
    """Without a GPU, a launch must return the error of CUDA's runtime, which is linked into the extension."""
    import torch

    from megatron_stppo import _csrc

    reward, value, advantage, returns = (x.data_ptr() for x in torch.zeros(4, 4))
    offsets = torch.tensor([0, 4])
    sizes = (offsets.data_ptr(), 0, 4, 1, 0, 1.0, 1.0)
    status = _csrc.gae(reward, value, *sizes, advantage, returns, True, 0)
    assert status == LAUNCH_FAILED, f"status {status}"
    return "refused by CUDA's runtime: no GPU"
