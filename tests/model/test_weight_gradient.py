"""Gradients of weights that are added to megatron's main gradients by one product, without apex."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_stppo.model import weight_gradient
from tests.model import accumulating
from tests.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"tensor": 2}),
    "tensor and sequence": (2, {"tensor": 2, "sequence": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sum_of_the_microbatches_is_never_rounded_to_bfloat16(layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    fused, plain = (
        run_ranks(accumulating.errors, world, parallel, "bfloat16", is_fused) for is_fused in (True, False)
    )
    for rank in range(world):
        assert fused[rank].keys() == {"column", "row"}
        assert max(fused[rank].values()) < 1e-6, fused[rank]
        assert min(plain[rank].values()) > 1e-3, plain[rank]


def test_float32_gradients_are_added_too() -> None:
    assert max(run_ranks(accumulating.errors, 1, {}, "float32", True)[0].values()) < 1e-6


def test_megatron_finds_the_stand_in_where_there_is_no_gpu() -> None:
    found, is_ours = run_ranks(accumulating.kernels, 1)[0]
    assert found and is_ours == (not torch.cuda.is_available() or not accumulating.apex())


@pytest.mark.parametrize("shape", [(48, 64), (24, 2, 64)])
def test_the_kernel_of_apex_adds_the_same(shape: tuple[int, ...]) -> None:
    if not (torch.cuda.is_available() and accumulating.apex()):
        pytest.skip("needs a GPU and NVIDIA's apex")
    import fused_weight_gradient_mlp_cuda as apex

    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        x, dy = (torch.randn(*shape, generator=generator).to("cuda", dtype) for _ in range(2))
        sums = [torch.ones(64, 64, device="cuda") for _ in range(2)]
        for kernel, main in zip((weight_gradient, apex), sums, strict=True):
            kernel.wgrad_gemm_accum_fp32(x, dy, main)
        torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(48,), (24, 2)])
def test_a_main_gradient_in_the_type_of_the_weight_is_added_to(shape: tuple[int, ...]) -> None:
    x, dy = torch.randn(*shape, 8).bfloat16(), torch.randn(*shape, 16).bfloat16()
    main = torch.ones(16, 8).bfloat16()
    weight_gradient.wgrad_gemm_accum_fp16(x, dy, main)
    exact = 1 + dy.double().flatten(0, -2).t() @ x.double().flatten(0, -2)
    torch.testing.assert_close(main.double(), exact, rtol=1e-2, atol=2e-2)
