"""The end of a policy: from hidden states of action tokens to their log-probs, and to a loss of them.

Logits exist a chunk at a time and for this rank's columns of the vocabulary only (ops/linear_logprob.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

from megatron_stppo import ops
from megatron_stppo.algorithm.ratio import Level, segment_offsets
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.parallel.groups import Place

# (loss, record) of the microbatch's action tokens [first, last) from logprob, entropy and sum p^2
Terms = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PolicyHead:
    """This rank's columns of the vocabulary. Columns from `vocab_size` on are megatron's padding."""

    weight: Tensor | None  # [V/TP, H]; None but on the last pipeline stage
    place: Place
    vocab_size: int
    temperature: float
    segments: Level  # no chunk ends inside one
    chunk: int  # rows of logits that exist at a time, but for a longer segment

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        place: Place,
        vocab_size: int,
        temperature: float = 1.0,
        segments: Level = "token",
        chunk: int = ops.CHUNK,
    ) -> PolicyHead:
        """Of a TokenModel, or of one in megatron's data-parallel wrapper."""
        weight = getattr(model, "module", model).vocabulary_weight()
        return cls(weight, place, vocab_size, temperature, segments, chunk)

    def logprob(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        """float32 [T] of the microbatch's action tokens, from hidden [T, H]."""
        bounds = self._bounds(hidden, microbatch)  # the loss's: the same bits as there
        logprob_T, _, _ = ops.linear_logprob(
            hidden, self._weight(), microbatch.target_T, bounds=bounds, **self._columns()
        )
        return logprob_T

    def loss(self, hidden: Tensor, microbatch: Microbatch, terms: Terms) -> tuple[Tensor, Tensor]:
        """(loss, record): the sums of `terms` over chunks of whole segments."""
        # every rank of the tensor group gets the part of the gradient that its columns make
        hidden = copy_to_tensor_model_parallel_region(hidden)
        bounds = self._bounds(hidden, microbatch)
        return ops.linear_loss(hidden, self._weight(), microbatch.target_T, bounds, terms, **self._columns())

    def offsets(self, microbatch: Microbatch) -> Tensor | None:
        """Of the segments; None: every token is one."""
        return segment_offsets(self.segments, microbatch.turn_offsets, microbatch.action_offsets)

    def _bounds(self, hidden: Tensor, microbatch: Microbatch) -> list[int]:
        return ops.chunk_bounds(self.offsets(microbatch), len(hidden), self.chunk)

    def _weight(self) -> Tensor:
        assert self.weight is not None, "the last pipeline stage has the head"
        return self.weight

    def _columns(self) -> dict[str, Any]:
        return {
            "vocab_start": self.place.tensor_rank * len(self._weight()),
            "vocab_size": self.vocab_size,
            "group": self.place.tensor_group,
            "temperature": self.temperature,
        }
