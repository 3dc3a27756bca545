"""A megatron-core GPT model whose output is for action tokens only.

On the last pipeline stage, a policy returns the hidden states of the action tokens. policy_head.py computes
log-probs from them, so that logits are never computed for other tokens, nor for all action tokens at once.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model.attention import Chosen, Pack, Rotation
from megatron_stppo.model.experts.routing import Routing
from megatron_stppo.model.value_head import ValueHead
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.weights.sharding.low_rank import Adaptation


class TokenModel(GPTModel):
    """A GPT model that returns hidden states [T, H] of a microbatch's action tokens; a critic returns values
    [T]."""

    routing: Routing | None = None  # set for an actor with Routing Replay
    adaptation: Adaptation | None = None  # its adapters, and a value head, are all that is trained

    def __init__(self, mesh: MeshRank, rotates_in_attention: bool, *args: Any, **kwargs: Any) -> None:
        """mesh: the ranks that share the model. rotates_in_attention: whether PackedAttention applies the
        rotary embedding. The other arguments are those of GPTModel."""
        super().__init__(*args, **kwargs)
        self.mesh = mesh
        self._rotates_in_attention = rotates_in_attention

    def forward(self, microbatch: Microbatch) -> Tensor:  # type: ignore[override]
        if self.routing is not None:
            self.routing.begin(microbatch)
        hidden = super().forward(
            input_ids=microbatch.tokens_P[None],
            position_ids=microbatch.position_P[None],
            attention_mask=None,
            packed_seq_params=Pack.of(microbatch, self.mesh, self._rotates_in_attention),
        )
        return self._head(hidden, microbatch) if self.post_process else hidden

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        embedded, angles, *rest = super()._preprocess(*args, **kwargs)
        recomputes = self.config.recompute_granularity is not None and torch.is_grad_enabled()
        if self.adaptation and self.pre_process and recomputes:
            # What is recomputed gets a gradient only if its input does, and a frozen embedding gives it none.
            embedded.requires_grad_()
        if not self._rotates_in_attention:
            return embedded, angles, *rest
        of_token = angles[kwargs["position_ids"][0], 0]
        kwargs["packed_seq_params"].rotation = Rotation.of(of_token, self.config.params_dtype)
        return embedded, None, *rest

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states  # megatron would project every token here

    def _head(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        if self.config.sequence_parallel:
            # Gather before the selection, because action tokens are spread unevenly over the ranks. The
            # operations that follow are the same on every rank, so the backward pass only has to split.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.mesh.tensor_group
            )
        if microbatch.history is None:
            selected = hidden[:, 0].index_select(0, microbatch.hidden_index_T)
        else:  # the first action token of each trajectory reads the last token of the prompt that they share
            selected = Chosen.apply(hidden[:, 0], microbatch.hidden_index_T)
        return self.output_layer(selected) if isinstance(self.output_layer, ValueHead) else selected

    def vocabulary_weight(self) -> Tensor | None:
        """Return the weight of the policy head, [V/TP, H], tied or not; None except on the last pipeline
        stage."""
        if not self.post_process:
            return None
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
