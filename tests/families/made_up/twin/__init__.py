"""A made-up family, in one folder: Llama with a norm after attention, and other names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from transformers import AutoConfig, LlamaConfig

from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.tiles import Entry


class TwinConfig(LlamaConfig):
    model_type = "twin"


AutoConfig.register("twin", TwinConfig)  # transformers knows those of real families


class Twin(ModelShape):
    model_type = "twin"
    architecture = "TwinForCausalLM"
    norms: ClassVar[Mapping[str, str]] = {**ModelShape.norms, "attention_norm": "self_attention.output_norm"}
    layer_class = "megatron_stppo.families.twin.layers:TwinLayers"
    cpu_engine = "megatron_stppo.families.twin.cpu_engine"

    @classmethod
    def held(cls, entry: Entry) -> dict[str, Entry]:
        return {entry.key.replace(".mixing.", ".self_attn."): entry}

    @classmethod
    def stored(cls, name: str) -> str:
        return name.replace(".self_attn.", ".mixing.")
