"""vLLM's LoRA with one adapter, whose A and B the reshard writes in place.

vLLM stacks the adapters of a batch: each layer has one tensor [slots, 1, largest rank, in] of every A and
one [slots, 1, out, largest rank] of every B, cut over the tensor-parallel ranks as the layer is. Here there
is one slot. An adapter of zeros is registered in it once, and every request names this adapter, so that vLLM
never loads one from a file. Rows and columns above the adapter's rank stay zero.
"""

from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from megatron_stppo.cluster.launch.vllm_environment import padded_rank
from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.low_rank import A, B, ServedAdapters, adapter_key

REQUEST = LoRARequest("policy", 1, "in memory")  # name, id, and a path, which vLLM never reads


def lora_arguments(adapters: ServedAdapters | None, platform: Any = current_platform) -> dict[str, Any]:
    """Return vLLM's arguments for these adapters; {} for None.

    Raises ConfigError if vLLM has no LoRA on the platform.
    """
    if adapters is None:
        return {}
    try:
        platform.get_punica_wrapper()
    except NotImplementedError as error:
        raise ConfigError(
            f"model.lora.sync=adapter: vLLM has no LoRA on {type(platform).__name__}; set "
            "model.lora.sync=merged"
        ) from error
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": padded_rank(adapters.rank),
        "lora_target_modules": list(adapters.targets),
    }


class EngineAdapters:
    """The adapter of one engine on one rank.

    worker: vLLM's, of an engine that was built with lora_arguments(adapters).
    """

    def __init__(self, worker: Any, adapters: ServedAdapters) -> None:
        self._manager, self._adapters = worker.model_runner.lora_manager._adapter_manager, adapters
        empty = self._manager.create_dummy_lora(REQUEST.lora_int_id, adapters.rank, {})
        self._manager.add_adapter(empty)
        self._manager.activate_adapter(REQUEST.lora_int_id)
        empty.loras.clear()  # copies in host memory, which vLLM would read if it evicted the adapter
        self.clear()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's A and B by their checkpoint names. Writing into them changes the adapter.

        The names and shapes are those of weights.sharding.low_rank.serving_adapter_spans.
        """
        rank, tensors = self._adapters.rank, dict[str, torch.Tensor]()
        for name, layer in self._manager.modules.items():
            prefix, _, last = name.rpartition(".")
            joined = self._manager.packed_modules_mapping.get(last, [last])
            for member, a, b in zip(joined, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
                if member in self._adapters.targets:
                    weight = f"{prefix}.{member}.weight"
                    tensors[adapter_key(weight, A)] = a[0, 0, :rank]
                    tensors[adapter_key(weight, B)] = b[0, 0, :, :rank]
        return tensors

    def clear(self) -> None:
        """Set the adapter to zero, and have vLLM write what its kernels read about a batch again.

        A GPU's memory has undefined content after vLLM has slept.
        """
        for layer in self._manager.modules.values():
            layer.reset_lora(0)
        self._manager._last_mapping = None
