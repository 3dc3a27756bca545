"""Fused kernels and their fallbacks.

One function each. Their reference implementations are in algorithm/.
"""

from megatron_stppo.ops.bucket_checksum import BucketChecksum, checksum
from megatron_stppo.ops.bucket_copy import BucketCopy
from megatron_stppo.ops.clipped_surrogate import clipped_surrogate
from megatron_stppo.ops.linear_logprob import CHUNK, Chunk, chunk_bounds, linear_logprob, linear_loss
from megatron_stppo.ops.vocab_logprob import vocab_logprob

__all__ = [
    "CHUNK",
    "BucketChecksum",
    "BucketCopy",
    "Chunk",
    "checksum",
    "chunk_bounds",
    "clipped_surrogate",
    "linear_logprob",
    "linear_loss",
    "vocab_logprob",
]
