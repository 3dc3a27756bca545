from tests.ops.test_clipped_surrogate import *  # noqa: F403
from tests.ops.test_surrogate_bits import *  # noqa: F403
from tests.ops.test_surrogate_hazards import *  # noqa: F403

del test_100_repeats_are_bitwise_equal  # noqa: F821 - nothing here is left to chance; see test_orders.py
