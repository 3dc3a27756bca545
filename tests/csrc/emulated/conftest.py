"""Runs the tests of the ops on the CUDA kernels, which a CPU executes thread by thread.

Every test runs under several orders of blocks, warps and lanes.
"""

import ctypes
import platform

import pytest
import torch

from megatron_stppo.ops import extension
from tests.csrc.throwaway import build_emulated_cuda, load
from tests.once import once


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    if platform.machine() != "x86_64":
        pytest.skip("the emulator switches between threads in x86-64 assembly")
    return load("emulated", once(tmp_path_factory, "emulated", build_emulated_cuda))


@pytest.fixture(
    scope="module",
    params=["rising", pytest.param("falling", marks=pytest.mark.long), "shuffled"],
    autouse=True,
)
def implementation(request, emulated):
    ctypes.CDLL(emulated.__file__).emulator_set_order(["rising", "falling", "shuffled"].index(request.param))
    counters = torch.zeros(1 << 16, dtype=torch.int32)

    def run(name, device, *arguments):
        if name == "clipped_surrogate":
            arguments[-5].fill_(torch.nan)  # the workspace: a number that is read must have been written
        plain = [extension.pointer(x) if x is None or isinstance(x, torch.Tensor) else x for x in arguments]
        return getattr(emulated, name)(*plain, True, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STPPO_OPS", "extension")
        patch.setattr(extension, "_csrc", emulated)
        patch.setattr(extension, "run", run)
        patch.setattr(extension, "tickets", lambda device, count: counters)
        yield "extension"
    assert not counters.any()


@pytest.fixture(scope="module")
def device():
    return torch.device("cpu")


@pytest.fixture(scope="module")
def raises():
    return False
