"""Products of two matrices of bfloat16 or float32 that are accumulated, and returned or added, in float32.

torch has them on a GPU (`out_dtype`). On a CPU the factors are copied to float32.

This module also stands in for the kernel of NVIDIA's apex with which megatron adds a weight's gradient to its
main gradient: megatron's linear layers with `gradient_accumulation_fusion` call two functions of the module
`fused_weight_gradient_mlp_cuda`. torch's product is one call of cuBLAS too, so that a run without apex loses
nothing. apex's kernel is used where it is installed. Does not import megatron, which looks for the kernel
while it is imported.
"""

import importlib
import sys

import torch
from torch import Tensor

APEX = "fused_weight_gradient_mlp_cuda"


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32. a: [n, k]. b: [k, m]. Both are bfloat16 or both are float32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def add_product(sums: Tensor, a: Tensor, b: Tensor, spare: int | None = None) -> None:
    """Add a @ b to `sums`, float32 [n, m], in place. The product itself is never rounded to bfloat16.

    spare: bytes that a copy of rows of a bfloat16 `a` may take on a CPU; None: as many as all of them take.
    """
    if a.dtype == torch.float32:
        sums.addmm_(a, b)
    elif a.is_cuda:  # without a copy of the product
        torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
    else:
        block = max(1, len(a)) if spare is None else max(64, spare // (4 * max(1, len(b))))
        right = b.float()
        for start in range(0, len(a), block):
            sums[start : start + block].addmm_(a[start : start + block].float(), right)


def stand_in_for_apex() -> None:
    """Make the kernel importable, if it is not. Call it before megatron is imported.

    Without a GPU apex's kernel is not used either, because it computes on a GPU only.
    """
    assert APEX in sys.modules or "megatron.core" not in sys.modules, "too late: megatron has looked for it"
    try:
        if torch.cuda.is_available():
            importlib.import_module(APEX)
    except ImportError:  # missing, or built for another torch
        pass
    sys.modules.setdefault(APEX, sys.modules[__name__])


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output.T @ total_input to main_grad, float32 [out, in], in place. The sum is not rounded.

    total_input: [..., in]. grad_output: [..., out]. Both are float32 or both are bfloat16. megatron has
    gathered the input of all ranks with sequence parallelism, and made both contiguous.
    """
    add_product(main_grad, grad_output.flatten(0, -2).t(), total_input.flatten(0, -2))


def wgrad_gemm_accum_fp16(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Do the same for a main_grad in the type of the factors."""
    main_grad.addmm_(grad_output.flatten(0, -2).t(), total_input.flatten(0, -2))
