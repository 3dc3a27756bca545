"""The layers of GPT-OSS: attention with sinks and windows, experts with biases, and YaRN's angles.

The softmax of attention has one more term per head, a sink. With scores s_j of a query and the sink z of its
head, p_j = exp(s_j) / (exp(z) + sum_i exp(s_i)). The sink belongs to no token, so that a query can attend to
nothing (OpenAI, gpt-oss model card, arXiv 2508.10925).

The projection of an expert has the rows of gate and up in turn; megatron would divide them into two halves.
It has biases of experts without tensor parallelism only: the second layer's would be added once per rank.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from megatron_stppo.config import Config
from megatron_stppo.families.gpt_oss import GptOss, SinkAttention
from megatron_stppo.model.attention import PackedAttention, Pieces, repeated_heads
from megatron_stppo.model.experts import LINEAR, GroupedExperts, products
from megatron_stppo.model.layers import Layers
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.ops.clamped_swiglu import clamped_swiglu
from megatron_stppo.ops.extension import to_device
from megatron_stppo.weights.sharding.parts import Mixer


def seen(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return bool [Q, K]: the keys that each query attends to. The last query and key are of one token.

    window: the number of tokens that a query sees, itself included; 0: all before.
    """
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask.triu(keys - queries - window + 1) if window else mask


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int) -> Tensor:
    """Return the attention [1, heads, Q, D] of q [1, heads, Q, D] to k and v [1, kv_heads, K, D].

    sinks [heads]. The softmax is computed in float32 or better; its result [heads, Q, K] is kept for the
    backward pass.
    """
    high = torch.promote_types(q.dtype, torch.float32)
    each = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(each, 1) for x in (k, v))
    mask = seen(q.shape[2], k.shape[2], window, q.device)
    scores = ((q @ k.transpose(2, 3)).to(high) * scale).masked_fill(~mask, -torch.inf)
    rows = sinks.to(high)[None, :, None, None].expand(1, -1, q.shape[2], 1)
    probabilities = torch.cat([scores, rows], -1).softmax(-1)[..., :-1]
    return probabilities.to(q.dtype) @ v


@dataclass(frozen=True)
class FlashPieces:
    """torch's variable-length attention of pieces on a GPU, without a sink, and its backward pass.

    Queries [P, heads, D], keys and values [K, heads, D].
    """

    pieces: Pieces
    scale: float
    window: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention [P, heads, D] and the log of the sum of exponentials, float32 [heads, P]."""
        out, logsum, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._sizes(), 0.0, self.window == 0, False, **self._bounds()
        )
        return out, logsum

    def gradients(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, of the probabilities that `logsum` gives."""
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is 0
        unused = torch.empty(0, device=q.device)
        of_q, of_k, of_v = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), q, k, v, out, logsum, *self._sizes(), 0.0, self.window == 0, state, unused,
            **self._bounds(),
        )  # fmt: skip
        return of_q, of_k, of_v

    def _sizes(self) -> tuple[Tensor, Tensor, int, int]:
        most = max(self.pieces.queries), max(self.pieces.keys)
        return self.pieces.query_offsets, self.pieces.key_offsets, *most

    def _bounds(self) -> dict[str, Any]:
        left = self.window - 1 if self.window else -1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}


class SinkOnFlash(Function):
    """Attention with sinks [heads], from attention without: with the logarithm L of the sum over the tokens,
    all probabilities are multiplied by exp(L - log(exp(L) + exp(z))).

    The backward pass of attention, given the output and the logarithm of the whole sum, returns the gradients
    of queries, keys and values. The sink's is -p_z <gradient, output> per query.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, pieces: FlashPieces) -> Tensor:
        out, logsum = pieces.attend(q, k, v)
        total = torch.logaddexp(logsum, sinks.to(logsum.dtype)[:, None])  # [heads, P]
        out = (out * (logsum - total).exp().t()[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.pieces = pieces
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        of_q, of_k, of_v = ctx.pieces.gradients(gradient, q, k, v, out, total)
        along = (gradient.to(total.dtype) * out).sum(-1).t()  # [heads, P]
        of_sinks = -((sinks.to(total.dtype)[:, None] - total).exp() * along).sum(1)
        return of_q, of_k, of_v, of_sinks.to(sinks.dtype), None


class PackedSinks(PackedAttention):
    """Attention with a sink per head, to the last `window` tokens; 0: to all."""

    def __init__(
        self, config: TransformerConfig, *args: Any, window: int, pg_collection: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.window, self.tp_group = window, pg_collection.tp
        own = config.num_attention_heads // self.tp_group.size()
        self.sinks = torch.nn.Parameter(torch.zeros(own, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.sinks, is_parallel=True, dim=0, stride=1)

    def _attend_piece(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return with_sinks(q, k, v, self.sinks, self.scale, self.window)

    def _attend_cuda(self, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces) -> Tensor:
        key, value = (repeated_heads(x, query, 1) for x in (key, value))
        flash = FlashPieces(pieces, self.scale, self.window)
        out: Tensor = SinkOnFlash.apply(query, key, value, self.sinks, flash)
        return out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return megatron's description of this rank's sinks, for checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            {"sinks": self.sinks},
            prefix,
            {"sinks": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class BiasedExperts(GroupedExperts):
    """The parameters are those of megatron's SequentialMLP with biases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:  # for checkpoints: megatron would cut the rows into two halves
            expert.config = copy.copy(expert.config)
            expert.config.gated_linear_unit = False

    def forward(self, rows_NH: Tensor, tokens_per_expert: Tensor, prob_N: Tensor) -> tuple[Tensor, None]:
        """Return the experts' outputs [N, H] times the probabilities, of which each tensor rank has a part.

        rows_NH: sorted by expert. tokens_per_expert: int64 [E], on the host.
        """
        counts, prob_N1 = tokens_per_expert.tolist(), prob_N[:, None]
        end_E = to_device(tokens_per_expert.cumsum(0).int(), rows_NH.device)
        down, up = LINEAR
        inner = self._multiply(rows_NH, end_E, up, counts) + self._biases(up, counts)
        high = torch.promote_types(inner.dtype, torch.float32)  # rounded once, as in vLLM's kernel
        inner = (clamped_swiglu(inner.to(high)) * prob_N1).to(rows_NH.dtype)
        out = self._multiply(inner, end_E, down, counts)
        # the tensor ranks' outputs are added up
        out = out + self._biases(down, counts) * (prob_N1 / self.tp_group.size())
        return out.to(rows_NH.dtype), None

    def _multiply(self, rows: Tensor, end_E: Tensor, name: str, counts: list[int]) -> Tensor:
        """Return each row times the transpose of its expert's weight. torch has no grouped product in
        float64."""
        weights = self.weights(name)
        if len(weights) > 1 and len(rows) and rows.dtype != torch.float64:
            adds = self.config.gradient_accumulation_fusion
            return products(rows, end_E, weights, counts if adds else None)
        parts = zip(rows.split(counts), weights, strict=True)
        return torch.cat([linear(part, weight) for part, weight in parts])

    def _biases(self, name: str, counts: list[int]) -> Tensor:
        """Return [N, O]: the bias of each row's expert."""
        biases = [getattr(expert, name).bias for expert in self.local_experts]
        rows: Tensor = _OfRows.apply(torch.stack(biases), counts)
        return rows


class _OfRows(Function):
    """Biases [E, O] -> rows [N, O]. Gradients are added up in float32 or better, in order."""

    @staticmethod
    def forward(ctx: Any, bias_EO: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        repeats = to_device(torch.tensor(counts), bias_EO.device)
        return bias_EO.repeat_interleave(repeats, 0, output_size=sum(counts))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        high = torch.promote_types(gradient.dtype, torch.float32)
        sums = [part.sum(0, dtype=high) for part in gradient.split(ctx.counts)]
        return torch.stack(sums).to(gradient.dtype), None


class SinkLayers(Layers):
    experts = BiasedExperts

    def __init__(self, shape: GptOss, config: Config, dtype: torch.dtype) -> None:
        super().__init__(shape, config, dtype)
        self._yarn, self._base = shape.yarn, shape.rope_theta

    def settings(self, fields: Mapping[str, Any]) -> TransformerConfig:
        settings = super().settings(fields)
        settings.add_bias_linear = True  # megatron refuses biases of experts with tensor parallelism
        return settings

    def local(self, mixer: Mixer) -> Any:
        assert isinstance(mixer, SinkAttention)
        spec = super().local(mixer)
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = partial(PackedSinks, window=mixer.window)
        return spec

    def finish(self, model: TokenModel) -> None:
        assert self._yarn is not None
        size = 2 * len(model.rotary_pos_emb.inv_freq)
        model.use_frequencies(self._yarn.frequencies(self._base, size), self._yarn.scale)
