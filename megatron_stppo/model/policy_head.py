"""The end of a policy: from hidden states of action tokens to their log-probs, and to a loss of them.

Logits exist a chunk at a time and for this rank's columns of the vocabulary only (ops/linear_logprob.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

from megatron_stppo import ops
from megatron_stppo.algorithm.ratio import Level, segment_offsets
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.parallel.groups import MeshRank

# (loss, record) of the microbatch's action tokens [first, last) from logprob, entropy, sum p^2, first, last
# and the offsets of their segments, counted from `first`; None: every token is a segment
Terms = Callable[[Tensor, Tensor, Tensor, int, int, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PolicyHead:
    """This rank's columns of the vocabulary. Columns from `vocab_size` on are megatron's padding."""

    weight: Tensor | None  # [V/TP, H]; None but on the last pipeline stage
    mesh: MeshRank
    vocab_size: int
    temperature: float
    segments: Level  # no chunk ends inside one
    chunk: int  # rows of logits that exist at a time, but for a longer segment

    @classmethod
    def of(
        cls,
        model: Sequence[torch.nn.Module],
        mesh: MeshRank,
        vocab_size: int,
        temperature: float = 1.0,
        segments: Level = "token",
        chunk: int = ops.CHUNK,
    ) -> PolicyHead:
        """Of a model's chunks, as they are or in megatron's data-parallel wrapper."""
        weight = getattr(model[-1], "module", model[-1]).vocabulary_weight()
        return cls(weight, mesh, vocab_size, temperature, segments, chunk)

    def logprob(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        """float32 [T] of the microbatch's action tokens, from hidden [T, H]."""
        bounds, _ = self._chunks(hidden, microbatch)  # the loss's: the same bits as there
        logprob_T, _, _ = ops.linear_logprob(
            hidden, self._weight(), microbatch.target_T, bounds=bounds, **self._columns()
        )
        return logprob_T

    def loss(self, hidden: Tensor, microbatch: Microbatch, terms: Terms) -> tuple[Tensor, Tensor]:
        """(loss, record): the sums of `terms` over chunks of whole segments."""
        # every rank of the tensor group gets the part of the gradient that its columns make
        hidden = copy_to_tensor_model_parallel_region(hidden)
        bounds, offsets = self._chunks(hidden, microbatch)
        following = iter(offsets)  # the op goes through the chunks in order, once

        def of_chunk(*given: Any) -> tuple[Tensor, Tensor]:
            return terms(*given, next(following))

        return ops.linear_loss(
            hidden, self._weight(), microbatch.target_T, bounds, of_chunk, **self._columns()
        )

    def _chunks(self, hidden: Tensor, microbatch: Microbatch) -> tuple[list[int], list[Tensor | None]]:
        """Where to cut the rows, and the offsets of each chunk's segments, from 0; None: a token is one.

        Ranks that share segments by context parallelism cut at the same ones: their sums meet chunk by chunk.
        """
        offsets = segment_offsets(self.segments, microbatch.turn_offsets, microbatch.action_offsets)
        whole = segment_offsets(self.segments, microbatch.whole_turn_offsets, microbatch.whole_action_offsets)
        if offsets is None or whole is None:
            bounds = ops.chunk_bounds(None, len(hidden), self.chunk)
            return bounds, [None] * (len(bounds) - 1)
        cuts = ops.chunk_bounds(whole, int(whole[-1]), self.chunk * self.mesh.context_size)
        at = torch.searchsorted(whole, torch.tensor(cuts, device=whole.device), right=True) - 1
        at[0] = 0  # empty segments at the beginning belong to the first chunk
        return offsets[at].tolist(), [offsets[a : b + 1] - offsets[a] for a, b in pairwise(at.tolist())]

    def _weight(self) -> Tensor:
        assert self.weight is not None, "the last pipeline stage has the head"
        return self.weight

    def _columns(self) -> dict[str, Any]:
        return {
            "vocab_start": self.mesh.tensor_rank * len(self._weight()),
            "vocab_size": self.vocab_size,
            "group": self.mesh.tensor_group,
            "temperature": self.temperature,
        }
