from tests.ops.test_bucket_checksum import *  # noqa: F403
