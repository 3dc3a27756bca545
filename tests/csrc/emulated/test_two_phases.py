from tests.ops.test_two_phases import *  # noqa: F403
