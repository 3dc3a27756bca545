"""Every test of an op runs twice: on the extension built from csrc/ and on its twin in plain torch."""

import os

import pytest


@pytest.fixture(scope="module", params=["torch", "extension"], autouse=True)
def implementation(request):
    before = os.environ.get("STPPO_OPS")
    os.environ["STPPO_OPS"] = request.param
    yield request.param
    if before is None:
        del os.environ["STPPO_OPS"]
    else:
        os.environ["STPPO_OPS"] = before
