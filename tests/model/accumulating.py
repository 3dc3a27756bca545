"""Functions that run on a rank: main gradients of megatron's linear layers in our data parallelism."""

from __future__ import annotations

import importlib.machinery
from typing import Any

from megatron_stppo.cluster.launch import process
from megatron_stppo.model import weight_gradient

TOKENS, INSIDE, OUTSIDE = 48, 64, 96  # of a micro-batch and of the two layers
MICROBATCHES = 3


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
    import torch
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


def apex() -> bool:
    """Return whether apex's kernel is installed."""
    return importlib.machinery.PathFinder.find_spec(weight_gradient.KERNEL) is not None


def kernels() -> tuple[bool, bool]:
    """Return whether megatron has found a kernel, and whether it is ours."""
    process.prepare(engine=False)
    from megatron.core.tensor_parallel import layers

    found = layers.fused_weight_gradient_mlp_cuda
    return layers._grad_accum_fusion_available, found is weight_gradient
