"""Core attention over packed sequences (THD), for the local layer spec: no padding, none across sequences.

torch's variable-length attention on CUDA; on a CPU scaled_dot_product_attention sequence by sequence, so that
a token's result does not depend on its neighbours in the pack.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(torch.nn.Module):
    """Causal attention of query [P, heads, D] over key, value [P, kv_heads, D]; returns [P, heads * D]."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        attend = self._attend_cuda if query.is_cuda else self._attend_each
        return attend(query, key, value, packed_seq_params).reshape(query.shape[0], -1)

    def _attend_each(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        lengths = packed.cu_seqlens_q.diff().tolist()
        pieces = [
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            for q, k, v in zip(
                *(x.transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)), strict=True
            )
        ]
        return torch.cat(pieces, dim=1).transpose(0, 1)

    def _attend_cuda(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        offsets, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        causal = (-1, 0)
        return varlen_attn(
            query, key, value, offsets, offsets, longest, longest,
            scale=self.scale, window_size=causal, enable_gqa=True,
        )  # fmt: skip
