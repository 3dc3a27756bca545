"""megatron's fused kernels: which of them a run uses, and why it does not use the others.

The fused kernels compute the same formulas as the separate operations and round less often. On a GPU they
are used where they can be. On a CPU none is, so that results do not depend on the packages that are
installed; only gradient_accumulation_fusion can be turned on there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from megatron.core.models.common.embeddings import rope_utils

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.parts import LayerSpec


@dataclass(frozen=True)
class Place:
    """What decides about the fusions: the device, the model's layers, and the kernels that are installed."""

    on_gpu: bool
    layers: LayerSpec
    has_experts: bool
    rotary_kernel: bool  # TransformerEngine's rotary embedding of packed sequences

    @classmethod
    def of(cls, config: Config, shape: ModelShape, on_gpu: bool) -> Self:
        """Return the place of a run on this machine. on_gpu: whether it computes on a GPU."""
        return cls(
            on_gpu,
            layer_spec(config),
            shape.experts > 0,
            rope_utils.fused_apply_rotary_pos_emb_thd is not None,
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
    rotary = "" if at.rotary_kernel else "this TransformerEngine has no kernel for packed sequences"
    reasons = {
        # compiled by torch.compile; keeps gate and up projection, but not silu(gate)
        "bias_activation_fusion": "local experts have products of their own" if own_products else "",
        # the order of tokens under context parallelism is that of TransformerEngine (data/context.py)
        "apply_rope_fusion": rotary if fused_layers else "local layers read each token's angles from a table",
    }
    reasons = reasons if at.on_gpu else dict.fromkeys(reasons, "there is no GPU")
    # the sum of the microbatches' gradients is then never rounded to bfloat16 (ops/products.py)
    return reasons | {"gradient_accumulation_fusion": ""}


def fields(at: Place, given: Mapping[str, Any]) -> dict[str, bool]:
    """Return megatron's fields of all fusions: on where they can be used, unless `given` turns them off. On a
    CPU they are off, unless `given` turns them on.

    given: the run's section `megatron`.
    """
    reasons = obstacles(at)
    return {field: not reason and bool(given.get(field, at.on_gpu)) for field, reason in reasons.items()}


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
