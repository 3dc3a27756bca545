"""Every test of an op runs twice: on the extension built from csrc/ and on its twin in plain torch.

Tests that ask for `device` run on the CPU and, where there is one, on a GPU.
"""

import os

import pytest
import torch


@pytest.fixture(scope="module", params=["torch", "extension"], autouse=True)
def implementation(request):
    before = os.environ.get("STPPO_OPS")
    os.environ["STPPO_OPS"] = request.param
    yield request.param
    if before is None:
        del os.environ["STPPO_OPS"]
    else:
        os.environ["STPPO_OPS"] = before


@pytest.fixture(scope="module", params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request):
    """Where new tensors are made. tests/ops/draws.py draws the same values for each."""
    with torch.device(request.param):
        yield torch.device(request.param)


@pytest.fixture(scope="module")
def raises(implementation, device):
    """Whether wrong numbers inside a tensor are an error. The extension on a GPU, which reads nothing back to
    the host, answers with NaN."""
    return not (implementation == "extension" and device.type == "cuda")
