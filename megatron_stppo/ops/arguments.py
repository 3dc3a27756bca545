"""Checks of the tensors passed to an op, in this order: device, dtype, shape, contiguity."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check(
    name: str,
    tensor: Tensor,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
) -> None:
    """Raise ValueError, with the argument's name and the remedy, if the tensor does not fit.

    None in `shape` matches any length.
    """
    fits = tensor.shape == shape and tensor.device == device and tensor.dtype in dtypes
    if fits and tensor.is_contiguous():
        return  # the usual case, in half the time of the checks below
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; move it to {device}, where the first argument is")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}; give {wanted}")
    fits = len(tensor.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; give [{wanted}]")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous; call .contiguous() first")
