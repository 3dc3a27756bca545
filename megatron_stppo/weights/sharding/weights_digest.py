"""The hash that identifies the weights that a run begins with, and that adapters belong to."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch.distributed as dist

from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.weights.sharding.hf_checkpoint import tensor_digests
from megatron_stppo.weights.sharding.hf_names import ModelShape, hf_shapes


@functools.cache
def weights_digest(folder: Path, shape: ModelShape) -> str:
    """Return 64 hexadecimal digits: a hash of names, types, shapes and bytes of a folder's tensors.

    Collective. It depends neither on the division into files nor on the number of ranks. The result is kept,
    because the weights are read only once.
    """
    keys = sorted(hf_shapes(shape))
    own = tensor_digests(folder, shape, keys[dist.get_rank() :: dist.get_world_size()])
    digests = sorted(digest for (of_rank,) in gather_records([own], list[str]) for digest in of_rank)
    return hashlib.sha256("".join(digests).encode()).hexdigest()
