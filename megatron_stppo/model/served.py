"""What an engine gets of this rank's adapters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_stppo.config import Config
from megatron_stppo.model.build import low_rank
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.sharding.hf_names import ModelShape
from megatron_stppo.sharding.low_rank import LowRank, Scaled, scaled_terms
from megatron_stppo.sharding.spans import training_spans


def served_terms(
    parameters: Mapping[str, Tensor], shape: ModelShape, config: Config, mesh: MeshRank
) -> Mapping[tuple[str, str], LowRank | Scaled]:
    """Return the terms with which an engine's rows are computed from a rank's (reshard/merging.py).

    parameters: build.named_parameters of the actor. Without adapters there are none.
    """
    lora = config.model.lora
    if not lora.rank or lora.sync == "merged":
        return low_rank(parameters, shape, config, mesh)
    weights = training_spans(shape, mesh.layout, mesh.rank, spec=layer_spec(config))
    return scaled_terms(weights, lora.names, lora.scale)
