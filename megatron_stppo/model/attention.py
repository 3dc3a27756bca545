"""Rotary embedding and core attention of packed sequences (THD layout), for megatron's local layer spec.

megatron's own rotary embedding reads the offsets of the sequences back to the host and computes all cosines
again, for queries and keys of every layer. Here, each token's angles are looked up once per microbatch.
Tokens attend only to tokens of their own sequence, and no padding is added. In bfloat16 on CUDA this is
torch's variable-length attention. On a CPU, and in float32, it is one scaled_dot_product_attention per piece,
so that a token's result does not depend on the other sequences of the pack. Under context parallelism, keys
and values are gathered over the ranks that share the sequences; queries are not moved (data/context.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from megatron_stppo.data import context
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.ops.extension import to_device
from megatron_stppo.parallel.groups import MeshRank


def repeated_heads(x: Tensor, query: Tensor, dim: int) -> Tensor:
    each = query.shape[1] // x.shape[dim]
    return x if each == 1 else x.repeat_interleave(each, dim)


# Whether varlen_attn takes keys and values with fewer heads than queries. In torch 2.11 it does not: they are
# repeated, which takes heads / kv_heads times their memory.
GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters
Made = TypeVar("Made")


class Rotated(torch.autograd.Function):
    """x cos + (x with exchanged halves) sin of x [P, heads, R]; the first half of the sines is negative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return (x * cosine).add_(x.roll(x.shape[-1] // 2, -1).mul_(sine))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return (gradient * cosine).add_((gradient * sine).roll(gradient.shape[-1] // 2, -1)), None, None


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of each token's angles, [P, 1, R]; the first R of a head's D elements are rotated.
    The first half of the sines is negative."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(cls, angle: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Rotation:
        """angle: float32 [P, 1, R], the two halves of R being equal. dtype: of queries and keys, which are
        multiplied by `scale` too."""
        first, second = angle.chunk(2, dim=-1)
        sine = torch.cat((-first, second), dim=-1).sin()
        return cls((angle.cos() * scale).to(dtype), (sine * scale).to(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x [P, heads, D]: the pairs (x[i], x[i + R/2]) turn by the token's angle i."""
        rotated = self.cosine.shape[-1]
        if rotated < x.shape[-1]:
            return torch.cat((self(x[..., :rotated]), x[..., rotated:]), dim=-1)
        out: Tensor = Rotated.apply(x, self.cosine, self.sine)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class Sequences:
    """The packed sequences of a micro-batch.

    Example: sequences of 2 and 3 tokens are Sequences(tensor([0, 1, 0, 1, 2]), (2, 3)).
    """

    position_P: Tensor  # int64: index of each token in its sequence
    lengths: tuple[int, ...]
    _made: dict[Any, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def starts(self) -> Tensor:
        """int64 [sequences + 1]: the first token of each sequence, and P. Example: [0, 2, 5]."""
        return to_device(torch.tensor([0, *accumulate(self.lengths)]), self.position_P.device)

    @cached_property
    def number_P(self) -> Tensor:
        """int32: the number of each token's sequence. Example: [0, 0, 1, 1, 1]."""
        return ((self.position_P == 0).cumsum(0) - 1).int()

    def once(self, make: Callable[[Sequences], Made]) -> Made:
        """Return make(self), which is computed for the first of a model's layers."""
        if make not in self._made:
            self._made[make] = make(self)
        made: Made = self._made[make]
        return made


@dataclass
class Pack(PackedSeqParams):
    """megatron's description of packed sequences, with the queries and keys of this rank's pieces."""

    pieces: Pieces | None = None
    rotation: Rotation | None = None  # set by TokenModel, for PackedAttention
    sequences: Sequences | None = None

    @classmethod
    def of(cls, microbatch: Microbatch, mesh: MeshRank, rotates_in_attention: bool) -> Pack:
        """rotates_in_attention: whether PackedAttention applies the rotary embedding. Then only the length of
        megatron's table of angles depends on max_seqlen. megatron keeps 32 tables on the device, so the
        length is rounded up to a power of two."""
        offsets, longest = microbatch.sequence_offsets, microbatch.longest
        if rotates_in_attention:
            longest = 1 << (longest - 1).bit_length()
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            pieces=Pieces.of(microbatch.lengths, offsets.device, mesh, microbatch.keys),
            sequences=Sequences(microbatch.position_P, tuple(microbatch.lengths.tolist())),
        )


@dataclass(frozen=True)
class Pieces:
    """The m pieces of attention on this rank: consecutive queries, and the keys that they attend to.

    The last key of a piece belongs to the same token as its last query.
    """

    queries: list[int]  # number of queries of each piece
    keys: list[int]  # number of keys of each piece
    where: Tensor | None  # int64: indices of the keys in those of all context ranks; None: as the queries
    group: dist.ProcessGroup  # the context ranks, which share the sequences
    query_offsets: Tensor  # int32 [m + 1], on the device
    key_offsets: Tensor  # int32 [m + 1], on the device

    @classmethod
    def of(
        cls, lengths: Tensor, device: torch.device, mesh: MeshRank, given: tuple[Tensor, Tensor] | None = None
    ) -> Pieces:
        """given: the keys of the first sequences, see prefixes.Segments."""
        rank, size = mesh.context_rank, mesh.context_size
        queries, keys, where = context.attended(lengths, rank, size)
        if given is not None:  # and one context rank; dummy tokens at the end attend to themselves
            dummies = int(lengths[len(given[0]) :].sum())
            keys = torch.cat([given[0], lengths[len(given[0]) :]])
            where = torch.cat([given[1], where[len(where) - dummies :]])
        offsets = torch.stack([functional.pad(n.cumsum(0), (1, 0)).int() for n in (queries, keys)])
        gathered = to_device(where, device) if size > 1 or given is not None else None
        moved = to_device(offsets, device).unbind()
        return cls(queries.tolist(), keys.tolist(), gathered, mesh.context_group, *moved)


class Chosen(torch.autograd.Function):
    """x[where] of x [rows, ...] and where [n], whose gradient is added up in float32.

    In bfloat16 the gradient of what n trajectories share, such as the keys and values of their prompt, would
    be rounded n times. On a GPU, index_add_ would add in any order, and the bits would differ between calls.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: Tensor) -> Tensor:
        ctx.save_for_backward(where)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.index_select(0, where)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (where,) = ctx.saved_tensors
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total, gradient = torch.zeros(ctx.shape, dtype=wide, device=gradient.device), gradient.to(wide)
        if gradient.is_cuda:
            total.index_put_((where,), gradient, accumulate=True)
        else:
            total.index_add_(0, where, gradient)
        return total.to(ctx.dtype), None


class Continued(torch.autograd.Function):
    """Causal attention of q [1, heads, Q, D] to k and v [1, kv_heads, K, D], of which the last Q are the
    queries' own tokens; on a CPU.

    A mask [Q, K] would be kept for the backward pass. Instead, attention to the own tokens and to those
    before is two calls without a mask, and their outputs are averaged with the sums of exponentials as
    weights. Given the output and the sum of both, each call's backward pass returns its part of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        (before, sum_before), (own, sum_own) = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *part, 0.0, causal, scale=scale)
            for *part, causal in _before_and_own(q, k, v)
        )
        both = torch.logaddexp(sum_before, sum_own)  # [1, heads, Q]
        out = before * (sum_before - both).exp()[..., None] + own * (sum_own - both).exp()[..., None]
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, both)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, both = ctx.saved_tensors
        (of_q, *before), (more, *own) = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, q, *part, out, both, 0.0, causal, scale=ctx.scale
            )
            for *part, causal in _before_and_own(q, k, v)
        )
        of_k, of_v = (torch.cat(two, dim=2) for two in zip(before, own, strict=True))
        return of_q + more, of_k, of_v, None


def _before_and_own(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Return (keys, values, causal) of the tokens before the queries' own, and of these."""
    cut = k.shape[2] - q.shape[2]
    return [(k[:, :, :cut], v[:, :, :cut], False), (k[:, :, cut:], v[:, :, cut:], True)]


def masked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return what Continued returns, on any device, with a mask [Q, K] that the backward pass keeps."""
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)


def again(x: Tensor, where: Tensor, chosen: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which views of `chosen`, the rows x[where], are not saved for the backward pass:
    they are chosen again in it.

    So the keys and values of what trajectories share take the memory of one copy, and of all copies only
    while the backward pass of a layer's attention runs.
    """
    x, storage = x.detach(), chosen.untyped_storage().data_ptr()
    waiting, copies = [0], list[Tensor]()  # views that the backward pass still needs

    def kept(saved: Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != storage:
            return saved
        waiting[0] += 1
        return saved.size(), saved.stride(), saved.storage_offset()

    def restored(of: Any) -> Tensor:
        if isinstance(of, Tensor):
            return of
        if not copies:
            copies.append(x.index_select(0, where))
        waiting[0] -= 1
        return (copies[0] if waiting[0] else copies.pop()).as_strided(*of)

    return saved_tensors_hooks(kept, restored)


class PackedAttention(torch.nn.Module):
    """Causal attention. forward() takes query [P, heads, D] and key, value [P, kv_heads, D], rotates queries
    and keys, and returns [P, heads * D]."""

    def __init__(
        self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        assert isinstance(packed_seq_params, Pack) and packed_seq_params.pieces is not None
        assert packed_seq_params.rotation is not None
        pieces, rotation = packed_seq_params.pieces, packed_seq_params.rotation
        query, key = rotation(query), rotation(key)
        varlen = self._uses_varlen(query)
        attend = self._attend_cuda if varlen else self._attend_each
        if pieces.where is None:
            return attend(query, key, value, pieces).reshape(query.shape[0], -1)
        both = tensor_parallel.gather_from_sequence_parallel_region(
            torch.stack([key, value], 1), group=pieces.group
        )
        if varlen and not GROUPED:  # before some are chosen, so that `again` keeps no repeated ones
            both = repeated_heads(both, query, 2)
        chosen: Tensor = Chosen.apply(both, pieces.where)
        with again(both, pieces.where, chosen):
            key, value = chosen.unbind(1)
            return attend(query, key, value, pieces).reshape(query.shape[0], -1)

    def _uses_varlen(self, query: Tensor) -> bool:
        return query.is_cuda and query.dtype != torch.float32  # which varlen_attn does not have

    def _attend_each(self, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces) -> Tensor:
        out = []
        lengths = (pieces.queries, pieces.keys, pieces.keys)
        # Shape [1, heads, tokens, D]: without a batch dimension torch uses slow, separate operations.
        for q, k, v in zip(
            *(x.transpose(0, 1)[None].split(n, 2) for x, n in zip((query, key, value), lengths, strict=True)),
            strict=True,
        ):
            out.append(self._attend_piece(q, k, v))
        return torch.cat(out, dim=2)[0].transpose(0, 1)

    def _attend_piece(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] == k.shape[2]:
            attend = functional.scaled_dot_product_attention
            return attend(q, k, v, scale=self.scale, enable_gqa=True, is_causal=True)
        # the queries belong to the last of these tokens
        attended: Tensor = (masked if q.is_cuda else Continued.apply)(q, k, v, self.scale)
        return attended

    def _attend_cuda(self, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces) -> Tensor:
        causal = (-1, 0)  # the causal mask is aligned with the last key, as the queries are
        grouped: dict[str, Any] = {"enable_gqa": True} if GROUPED else {}
        key, value = (x if GROUPED else repeated_heads(x, query, 1) for x in (key, value))
        out = varlen_attn(
            query, key, value, pieces.query_offsets, pieces.key_offsets,
            max(pieces.queries), max(pieces.keys),
            scale=self.scale, window_size=causal, **grouped,
        )  # fmt: skip
        assert isinstance(out, Tensor)  # a pair only if log-sum-exps are asked for
        return out
