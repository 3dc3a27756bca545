"""The critic's output: one scalar per selected token instead of a vocabulary."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class ValueHead(torch.nn.Module):
    """Maps hidden states [T, H] to values, float32 [T].

    The head is replicated over tensor parallel ranks, which all have the complete hidden states. Its weights
    start at zero, so that the first advantages are the returns, without the noise of a random head.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden.float() @ self.weight.float().t() + self.bias.float()).squeeze(-1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
        )
