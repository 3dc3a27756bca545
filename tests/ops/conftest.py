"""Every test of an op runs twice: with the extension built from csrc/ and with the torch fallback.

Tests with the fixture `device` run on the CPU and, if there is one, on a GPU.
"""

import os

import pytest
import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
# Where the bits of a row do not depend on the other rows, as ops/vocab_logprob.py promises. Without the
# fallback on a GPU: there torch chooses the order of a sum by the number of rows.
ROW_ALONE = [("torch", "cpu"), ("extension", "cpu"), ("extension", "cuda")]


@pytest.hookimpl(tryfirst=True)  # before the fixtures' own parameters are taken
def pytest_generate_tests(metafunc):
    """Run tests with the mark row_alone for the implementations of ROW_ALONE only."""
    if metafunc.definition.get_closest_marker("row_alone"):
        here = [pair for pair in ROW_ALONE if pair[1] in DEVICES]
        chosen = pytest.mark.parametrize(("implementation", "device"), here, indirect=True, scope="module")
        metafunc.definition.add_marker(chosen)


@pytest.fixture(scope="module", params=["torch", "extension"], autouse=True)
def implementation(request):
    before = os.environ.get("STPPO_OPS")
    os.environ["STPPO_OPS"] = request.param
    yield request.param
    if before is None:
        del os.environ["STPPO_OPS"]
    else:
        os.environ["STPPO_OPS"] = before


@pytest.fixture(scope="module", params=DEVICES)
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
