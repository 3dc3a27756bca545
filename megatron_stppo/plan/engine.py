"""An arithmetic estimate of vLLM's memory on one GPU. vLLM's modules are not built for a plan."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stppo.config import Config
from megatron_stppo.plan.hardware import Gpu
from megatron_stppo.sharding.hf_names import ModelShape

PREFILL = 8192  # tokens of one step, as rollout/vllm_setup.py sets them


@dataclass(frozen=True)
class EngineUse:
    """Bytes on one GPU.

    The share rollout.gpu_memory_utilization is divided into weights, working and cache.
    """

    weights: int
    working: int  # activations of a step and logits of a sample
    cache: int  # the rest, for keys and values; negative if weights and working exceed the share
    cache_per_token: int

    @property
    def total(self) -> int:
        return self.weights + self.working + max(0, self.cache)

    @property
    def cached_tokens(self) -> int:
        return max(0, self.cache) // self.cache_per_token

    @classmethod
    def of(cls, config: Config, shape: ModelShape, weights: int, size: int, gpu: Gpu) -> EngineUse:
        """Return the estimate. weights: bytes of an engine's shard; size: bytes per element."""
        tensor, sequences = config.engine_tensor, config.rollout.max_sequences
        heads = max(1, shape.kv_heads // tensor)
        # The peak of a step: the residual stream twice, an MLP's input, gate, up and their product.
        step = max(PREFILL, sequences) * (3 * shape.hidden + 3 * shape.ffn // tensor) * size
        # The sampler needs whole rows in float32: logits, their softmax and a sorted copy.
        working = step + 3 * sequences * shape.vocab * 4
        budget = int(config.rollout.gpu_memory_utilization * gpu.memory)
        per_token = 2 * shape.layers * heads * shape.head_dim * size
        return cls(weights, working, budget - weights - working, per_token)
