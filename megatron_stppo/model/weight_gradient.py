"""Stand-in for the kernel of NVIDIA's apex with which megatron adds a weight's gradient to its main gradient.

megatron's linear layers with `gradient_accumulation_fusion` call two functions of the module
`fused_weight_gradient_mlp_cuda`. torch has the same product, on a GPU in one call of cuBLAS as apex, so that
a run without apex loses nothing. apex's kernel is used where it is installed.

This module must not import megatron, which looks for the kernel while it is imported.
"""

from __future__ import annotations

import importlib
import sys

import torch
from torch import Tensor

from megatron_stppo.ops.products import add_product

KERNEL = "fused_weight_gradient_mlp_cuda"


def provide() -> None:
    """Make the kernel importable, if it is not. Call it before megatron is imported.

    Without a GPU apex's kernel is not used either, because it computes on a GPU only.
    """
    assert KERNEL in sys.modules or "megatron.core" not in sys.modules, "too late: megatron has looked for it"
    try:
        if torch.cuda.is_available():
            importlib.import_module(KERNEL)
    except ImportError:  # missing, or built for another torch
        pass
    sys.modules.setdefault(KERNEL, sys.modules[__name__])


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output.T @ total_input to main_grad, float32 [out, in], in place. The sum is not rounded.

    total_input: [..., in]. grad_output: [..., out]. Both are float32 or both are bfloat16. megatron has
    gathered the input of all ranks with sequence parallelism, and made both contiguous.
    """
    add_product(main_grad, grad_output.flatten(0, -2).t(), total_input.flatten(0, -2))


def wgrad_gemm_accum_fp16(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Do the same for a main_grad in the type of the factors."""
    main_grad.addmm_(grad_output.flatten(0, -2).t(), total_input.flatten(0, -2))
