"""A SwiGLU with bounds, of experts (OpenAI, arXiv 2508.10925, section 2.2)."""

import torch
from torch import Tensor

SLOPE, LIMIT = 1.702, 7.0  # as vLLM has them


def clamped_swiglu(rows: Tensor) -> Tensor:
    """Return (up + 1) gate sigmoid(1.702 gate) [..., F] of rows [..., 2 F], which are gate and up in turn.

    Gates are at most 7, ups between -7 and 7.
    """
    gate, up = rows[..., ::2].clamp(max=LIMIT), rows[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(SLOPE * gate)
