"""megatron's fused kernels: which of them a run uses, and why it does not use the others.

The fused kernels compute the same formulas as the separate operations and round less often. They are used on
a GPU only, so that results on a CPU do not depend on the packages that are installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers as parallel_layers

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.spans import LayerSpec


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


NAMES = {  # {field of megatron's TransformerConfig: what it fuses}
    "bias_activation_fusion": "SwiGLU",
    "apply_rope_fusion": "rotary embedding",
    "gradient_accumulation_fusion": "gradients of the weights",
}


def obstacles(at: Place) -> dict[str, str]:
    """Return {field of a fusion: why it cannot be used, or "" if it can}."""
    fused_layers = at.layers == "transformer_engine"
    own_products = at.has_experts and not fused_layers
    experts = "local experts have products of their own" if own_products else ""
    kernel = "" if at.gradient_kernel else "apex's fused_weight_gradient_mlp_cuda is missing"
    rotary = "" if at.rotary_kernel else "this TransformerEngine has no kernel for packed sequences"
    found = {
        # compiled by torch.compile; keeps gate and up projection, but not silu(gate)
        "bias_activation_fusion": experts,
        # the order of tokens under context parallelism is that of TransformerEngine (data/context.py)
        "apply_rope_fusion": rotary if fused_layers else "local layers read each token's angles from a table",
        # the sum of the microbatches' gradients is then never rounded to bfloat16
        "gradient_accumulation_fusion": experts or kernel,
    }
    return found if at.on_gpu else dict.fromkeys(found, "there is no GPU")


def fields(at: Place, given: Mapping[str, Any]) -> dict[str, bool]:
    """Return megatron's fields of all fusions: on where they can be used, unless `given` turns them off.

    given: the run's section `megatron`.
    """
    return {field: not reason and bool(given.get(field, True)) for field, reason in obstacles(at).items()}


def check(at: Place, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if `given`, the section `megatron`, asks for a fusion that cannot be used."""
    for field, reason in obstacles(at).items():
        if given.get(field) and reason:
            raise ConfigError(f"megatron.{field}={given[field]}: {reason}; leave it out")


def summary(at: Place, given: Mapping[str, Any]) -> str:
    """Return one phrase: the fusions that the run uses, and why it does not use the others.

    Example: "fused: SwiGLU; not fused: rotary embedding (local layers read each token's angles from a table)"
    """
    reasons, wanted = obstacles(at), fields(at, given)
    named = {
        "fused": [NAMES[field] for field, on in wanted.items() if on],
        "not fused": [
            f"{NAMES[field]} ({reasons[field] or f'megatron.{field}=false'})"
            for field, on in wanted.items()
            if not on
        ],
    }
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in named.items() if names)
