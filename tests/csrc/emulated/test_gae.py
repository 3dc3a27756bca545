from tests.ops.test_gae_hazards import *  # noqa: F403
