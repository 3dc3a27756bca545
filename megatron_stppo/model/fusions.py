"""megatron's fused kernels: which of them a run uses, and why it does not use the others.

The fused kernels compute the same formulas as the separate operations and round less often. They are used on
a GPU only, so that results on a CPU do not depend on the packages that are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers as parallel_layers

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.mlp_spans import LayerSpec


@dataclass(frozen=True)
class Place:
    """What decides about the fusions: the device, the model's layers, and the kernels that are installed."""

    on_gpu: bool
    layers: LayerSpec
    has_experts: bool
    rotary_kernel: bool  # TransformerEngine's rotary embedding of packed sequences
    gradient_kernel: bool  # apex's product that is added to a float32 buffer

    @classmethod
    def of(cls, config: Config, shape: ModelShape, on_gpu: bool) -> Place:
        """Return the place of a run on this machine. on_gpu: whether it computes on a GPU."""
        return cls(
            on_gpu,
            layer_spec(config),
            shape.experts > 0,
            rope_utils.fused_apply_rotary_pos_emb_thd is not None,
            # the flag that megatron's own check reads; TransformerEngine's layers need the kernel too,
            # because megatron builds the policy head with its local layer
            parallel_layers._grad_accum_fusion_available,
        )


@dataclass(frozen=True)
class Need:
    """A condition of a fusion, and the reason to give where it is not met."""

    holds: Callable[[Place], bool]
    otherwise: str


@dataclass(frozen=True)
class Fusion:
    field: str  # of megatron's TransformerConfig
    name: str
    needs: tuple[Need, ...]

    def obstacle(self, at: Place) -> str | None:
        """Return why the fusion cannot be used, or None if it can."""
        return next((need.otherwise for need in self.needs if not need.holds(at)), None)


GPU = Need(lambda at: at.on_gpu, "there is no GPU")
DENSE = Need(
    lambda at: not at.has_experts or at.layers == "transformer_engine",
    "local experts have products of their own",
)
FUSIONS = (
    # compiled by torch.compile; keeps gate and up projection, but not silu(gate)
    Fusion("bias_activation_fusion", "SwiGLU", (GPU, DENSE)),
    # the order of tokens under context parallelism is that of TransformerEngine (data/context.py)
    Fusion(
        "apply_rope_fusion",
        "rotary embedding",
        (
            GPU,
            Need(
                lambda at: at.layers == "transformer_engine",
                "local layers read each token's angles from a table",
            ),
            Need(lambda at: at.rotary_kernel, "this TransformerEngine has no kernel for packed sequences"),
        ),
    ),
    # the sum of the microbatches' gradients is then never rounded to bfloat16
    Fusion(
        "gradient_accumulation_fusion",
        "gradients of the weights",
        (GPU, DENSE, Need(lambda at: at.gradient_kernel, "apex's fused_weight_gradient_mlp_cuda is missing")),
    ),
)


def fields(at: Place, given: Mapping[str, Any]) -> dict[str, bool]:
    """Return megatron's fields of all fusions: on where they can be used, unless `given` turns them off.

    given: the run's section `megatron`.
    """
    return {
        fusion.field: fusion.obstacle(at) is None and bool(given.get(fusion.field, True))
        for fusion in FUSIONS
    }


def check(at: Place, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if `given`, the section `megatron`, asks for a fusion that cannot be used."""
    for fusion in FUSIONS:
        reason = fusion.obstacle(at)
        if given.get(fusion.field) and reason:
            raise ConfigError(f"megatron.{fusion.field}={given[fusion.field]}: {reason}; leave it out")


def summary(at: Place, given: Mapping[str, Any]) -> str:
    """Return one phrase: the fusions that the run uses, and why it does not use the others.

    Example: "fused: SwiGLU; not fused: rotary embedding (local layers read each token's angles from a table)"
    """
    wanted = fields(at, given)
    named = {
        "fused": [fusion.name for fusion in FUSIONS if wanted[fusion.field]],
        "not fused": [
            f"{fusion.name} ({fusion.obstacle(at) or f'megatron.{fusion.field}=false'})"
            for fusion in FUSIONS
            if not wanted[fusion.field]
        ],
    }
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in named.items() if names)
