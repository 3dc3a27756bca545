"""Gradients of weights that are added to megatron's main gradients by one product, without apex."""

from __future__ import annotations

import importlib.machinery
from typing import Any

import pytest
import torch

from megatron_stppo.cluster.launch import process
from megatron_stppo.ops import products
from tests.ranks import run_ranks

TOKENS, INSIDE, OUTSIDE = 48, 64, 96  # of a micro-batch and of the two layers
MICROBATCHES = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"tensor": 2}),
    "tensor and sequence": (2, {"tensor": 2, "sequence": True}),
}


def errors(parallel: dict[str, Any], kind: str, fused: bool) -> dict[str, float]:
    """Return {layer: norm(main_grad - exact) / norm(exact)} of a column- and a row-parallel layer.

    The exact gradient is computed in float64 from the same factors.
    """
    process.prepare(engine=False)
    from megatron_stppo.config import ParallelConfig
    from megatron_stppo.parallel import groups

    return errors_in(groups.initialize(ParallelConfig(**parallel)), parallel, kind, fused)


def errors_in(mesh: Any, parallel: dict[str, Any], kind: str, fused: bool) -> dict[str, float]:
    """Do the same in groups that exist, on torch's default device."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megatron_stppo.config import Config
    from megatron_stppo.model.build import data_parallel, transformer_config
    from megatron_stppo.weights.sharding.hf_names import ModelShape

    dtype = getattr(torch, kind)
    given = {"model": {"path": "none"}, "megatron": {"gradient_accumulation_fusion": fused}}
    config = Config.model_validate(given | {"parallel": parallel})
    shape = ModelShape("", 1, INSIDE, 2, 2, 32, OUTSIDE, 96, False, 1e6, 1e-6, 64)
    settings = transformer_config(shape, config, mesh, dtype)
    assert settings.gradient_accumulation_fusion == fused
    init = settings.init_method
    column = ColumnParallelLinear(INSIDE, OUTSIDE, config=settings, init_method=init, bias=False)
    row = RowParallelLinear(
        OUTSIDE,
        INSIDE,
        config=settings,
        init_method=init,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )
    found, ranks = {}, mesh.tensor_size if config.parallel.sequence else 1
    for name, layer in {"column": column, "row": row}.items():
        (wrapped,) = data_parallel([layer.to(dtype)], distributed_optimizer=True)  # type: ignore[list-item]
        wrapped.zero_grad_buffer()
        exact = torch.zeros(layer.weight.shape, dtype=torch.float64)
        generator = torch.Generator("cpu").manual_seed(0)  # the same numbers on every rank
        for _ in range(MICROBATCHES):
            gradient, x = (
                torch.randn(TOKENS, 1, size, generator=generator, device="cpu").to(layer.weight)
                for size in layer.weight.shape
            )
            # with sequence parallelism a rank has a part of the tokens where no layer is cut
            own_x, own = (of.chunk(ranks)[mesh.tensor_rank] if ranks > 1 else of for of in (x, gradient))
            out, _ = layer((own_x if name == "column" else x).clone().requires_grad_())
            out.backward(own if name == "row" else gradient)
            exact += gradient.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
        assert layer.weight.grad is None
        found[name] = float((layer.weight.main_grad - exact).norm() / exact.norm())
    return found


def has_apex() -> bool:
    return importlib.machinery.PathFinder.find_spec(products.APEX) is not None


def kernels() -> tuple[bool, bool]:
    """Return whether megatron has found a kernel, and whether it is ours."""
    process.prepare(engine=False)
    from megatron.core.tensor_parallel import layers

    found = layers.fused_weight_gradient_mlp_cuda
    return layers._grad_accum_fusion_available, found is products


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sum_of_the_microbatches_is_never_rounded_to_bfloat16(layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    fused, plain = (run_ranks(errors, world, parallel, "bfloat16", is_fused) for is_fused in (True, False))
    for rank in range(world):
        assert fused[rank].keys() == {"column", "row"}
        assert max(fused[rank].values()) < 1e-6, fused[rank]
        assert min(plain[rank].values()) > 1e-3, plain[rank]


def test_float32_gradients_are_added_too() -> None:
    assert max(run_ranks(errors, 1, {}, "float32", True)[0].values()) < 1e-6


def test_megatron_finds_the_stand_in_where_there_is_no_gpu() -> None:
    found, is_ours = run_ranks(kernels, 1)[0]
    assert found and is_ours == (not torch.cuda.is_available() or not has_apex())


@pytest.mark.parametrize("shape", [(48, 64), (24, 2, 64)])
def test_the_kernel_of_apex_adds_the_same(shape: tuple[int, ...]) -> None:
    if not (torch.cuda.is_available() and has_apex()):
        pytest.skip("needs a GPU and NVIDIA's apex")
    import fused_weight_gradient_mlp_cuda as apex

    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        x, dy = (torch.randn(*shape, generator=generator).to("cuda", dtype) for _ in range(2))
        sums = [torch.ones(64, 64, device="cuda") for _ in range(2)]
        for kernel, main in zip((products, apex), sums, strict=True):
            kernel.wgrad_gemm_accum_fp32(x, dy, main)
        torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(48,), (24, 2)])
def test_a_main_gradient_in_the_type_of_the_weight_is_added_to(shape: tuple[int, ...]) -> None:
    x, dy = torch.randn(*shape, 8).bfloat16(), torch.randn(*shape, 16).bfloat16()
    main = torch.ones(16, 8).bfloat16()
    products.wgrad_gemm_accum_fp16(x, dy, main)
    exact = 1 + dy.double().flatten(0, -2).t() @ x.double().flatten(0, -2)
    torch.testing.assert_close(main.double(), exact, rtol=1e-2, atol=2e-2)
