"""Every test of an op runs twice: with the extension built from csrc/ and with the torch fallback.

Tests with the fixture `device` run on the CPU and, if there is one, on a GPU.
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
    """The device of new tensors. tests/ops/draws.py draws the same values on each device."""
    with torch.device(request.param):
        yield torch.device(request.param)


@pytest.fixture(scope="module")
def raises(implementation, device):
    """Whether invalid values inside a tensor raise an error.

    The extension on a GPU reads nothing back to the host, so it returns NaN instead.
    """
    return not (implementation == "extension" and device.type == "cuda")
