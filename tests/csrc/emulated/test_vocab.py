import pytest

from tests.ops.test_vocab_bits import *  # noqa: F403
from tests.ops.test_vocab_hazards import *  # noqa: F403

del test_100_repeats_are_bitwise_equal  # noqa: F821 - nothing here is left to chance; see test_orders.py


@pytest.fixture(scope="module")
def raises():
    return True  # the merged numbers lie on the host, which looks at the flags of missing targets
