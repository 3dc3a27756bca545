"""Computes log-probs of action tokens, and a loss of them, from the policy's hidden states.

Logits are computed for one chunk of tokens at a time, and only for this rank's columns of the vocabulary
(ops/linear_logprob.py).
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
from megatron_stppo.config import Config
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.ops.extension import to_device
from megatron_stppo.parallel.groups import MeshRank


@dataclass(frozen=True)
class ActionTokens:
    """Consecutive action tokens of a microbatch, as a loss needs them. They hold whole segments."""

    logprob_T: Tensor  # float32
    entropy_T: Tensor  # float32, of the whole distribution
    sum_p_sq_T: Tensor  # float32, sum of its squared probabilities
    rows_T: Tensor  # int64 on the host: rows of the Batch's T
    offsets: Tensor | None  # int64 into these tokens; None: every token is a segment


Terms = Callable[[ActionTokens], tuple[Tensor, Tensor]]  # returns (loss, record)


@dataclass(frozen=True)
class PolicyHead:
    """The policy head on this rank's columns of the vocabulary.

    Columns with an index of `vocab_size` or more are megatron's padding.
    """

    weight: Tensor | None  # [V/TP, H]; None except on the last pipeline stage
    mesh: MeshRank
    vocab_size: int
    temperature: float
    segments: Level  # a chunk never ends inside a segment of this level
    chunk: int  # rows of logits computed at a time; a longer segment is a larger chunk
    float32_logits: bool = False  # compute the logits of a bfloat16 model in float32, as the engine then does

    @classmethod
    def of(
        cls,
        model: Sequence[torch.nn.Module],
        mesh: MeshRank,
        vocab_size: int,
        temperature: float = 1.0,
        segments: Level = "token",
        chunk: int = ops.CHUNK,
        *,
        float32_logits: bool = False,
    ) -> PolicyHead:
        """Return the head of a model, given its chunks with or without megatron's data-parallel wrapper."""
        last: Any = getattr(model[-1], "module", model[-1])
        weight = last.vocabulary_weight()
        return cls(weight, mesh, vocab_size, temperature, segments, chunk, float32_logits)

    @classmethod
    def configured(
        cls, model: Sequence[torch.nn.Module], mesh: MeshRank, vocab_size: int, config: Config, on_gpu: bool
    ) -> PolicyHead:
        """Return the head of actor or reference, with the settings of a run."""
        return cls.of(
            model,
            mesh,
            vocab_size,
            config.rollout.temperature,
            config.algorithm.segments,
            config.update.logit_rows,
            float32_logits=config.model.float32_logits(on_gpu),
        )

    def logprob(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the log-probs of the microbatch's action tokens, float32 [T], from hidden [T, H]."""
        bounds, _ = self._chunks(hidden, microbatch)  # the same chunks as in loss(), for bit-equal results
        logprob_T, _, _ = ops.linear_logprob(
            hidden, self._weight(), microbatch.target_T, bounds, **self._columns()
        )
        return logprob_T

    def loss(self, hidden: Tensor, microbatch: Microbatch, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss, record, logprob_T).

        Loss and record are the sums of `terms` over chunks of whole segments. logprob_T: float32 [T], the
        log-probs of the microbatch's action tokens, without a gradient.
        """
        # Each rank of the tensor group computes the gradient from its own columns; the backward sums them.
        hidden = copy_to_tensor_model_parallel_region(hidden)
        bounds, offsets = self._chunks(hidden, microbatch)
        following = iter(offsets)  # the op processes the chunks in order, once

        def of_chunk(chunk: ops.Chunk) -> tuple[Tensor, Tensor]:
            rows_T = microbatch.rows_T[chunk.first : chunk.last]
            tokens = ActionTokens(chunk.logprob, chunk.entropy, chunk.sum_p_sq, rows_T, next(following))
            return terms(tokens)

        return ops.linear_loss(
            hidden, self._weight(), microbatch.target_T, bounds, of_chunk, **self._columns()
        )

    def _chunks(self, hidden: Tensor, microbatch: Microbatch) -> tuple[list[int], list[Tensor | None]]:
        """Return the bounds of the chunks of rows, and for each chunk the offsets of its segments, relative
        to its start (None: every token is a segment).

        Context-parallel ranks that share segments use the same chunks of segments, because they reduce sums
        chunk by chunk.
        """
        level, offsets = self.segments, (microbatch.turn_offsets, microbatch.action_offsets)
        own = segment_offsets(level, *offsets)
        whole = segment_offsets(level, microbatch.whole_turn_offsets, microbatch.whole_action_offsets)
        if own is None or whole is None:
            bounds = ops.chunk_bounds(None, len(hidden), self.chunk)
            return bounds, [None] * (len(bounds) - 1)
        cuts = ops.chunk_bounds(whole, int(whole[-1]), self.chunk * self.mesh.context_size)
        places, moved = _places(whole, cuts), to_device(own, hidden.device)
        return own[places].tolist(), [moved[a : b + 1] - moved[a] for a, b in pairwise(places.tolist())]

    def _weight(self) -> Tensor:
        assert self.weight is not None, "the last pipeline stage has the head"
        return self.weight

    def _columns(self) -> dict[str, Any]:
        return {
            "vocab_start": self.mesh.tensor_rank * len(self._weight()),
            "vocab_size": self.vocab_size,
            "group": self.mesh.tensor_group,
            "temperature": self.temperature,
            "float32_logits": self.float32_logits,
        }


def _places(whole: Tensor, cuts: list[int]) -> Tensor:
    """Return the numbers of the segments that start at the cuts, positions in the whole microbatch."""
    at = torch.searchsorted(whole, torch.tensor(cuts), right=True) - 1
    at[0] = 0  # empty segments at the start belong to the first chunk
    return at
