"""vLLM's model. vLLM has those of real families itself."""

from __future__ import annotations

from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class TwinLayer(LlamaDecoderLayer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        norm = self.post_attention_layernorm
        self.attention_norm = RMSNorm(self.hidden_size, eps=norm.variance_epsilon)
        attend = self.self_attn.forward
        self.self_attn.forward = lambda *given, **named: self.attention_norm(attend(*given, **named))


class TwinForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=TwinLayer)


def prepare() -> None:
    ModelRegistry.register_model("TwinForCausalLM", TwinForCausalLM)
