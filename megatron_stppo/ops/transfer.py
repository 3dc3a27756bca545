"""Copies from the host to a GPU for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stppo.ops.extension import has_data


def to_device(tensor: Tensor, device: torch.device | str | int) -> Tensor:
    """Return a host tensor on `device`. The host does not wait for the GPU.

    A copy from pageable memory would make it wait, even with non_blocking=True.
    """
    if torch.device(device).type == "cuda" and has_data(tensor):
        tensor = tensor.pin_memory()  # torch keeps the pinned memory until the copy is done
    return tensor.to(device, non_blocking=True)
