from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention

from megatron_stppo.model.layers import Layers, RMSNorm


class NormedAttention(SelfAttention):
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.output_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, bias = super().forward(*args, **kwargs)
        return self.output_norm(out), bias


class TwinLayers(Layers):
    def local(self, mixer: Any) -> Any:
        spec = super().local(mixer)
        spec.submodules.self_attention.module = NormedAttention
        return spec
