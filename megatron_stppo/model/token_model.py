"""A megatron-core GPT model whose output is for action tokens only.

On the last pipeline stage, a policy returns the hidden states of the action tokens. policy_head.py computes
log-probs from them, so that logits are never computed for other tokens, nor for all action tokens at once.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model.attention import Chosen, Pack, Rotation
from megatron_stppo.model.routing_replay import Routing
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.weights.sharding.low_rank import Adaptation


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
        self._rotates_in_attention, self._rotary_scale = rotates_in_attention, 1.0

    def use_frequencies(self, angles: Sequence[float], scale: float) -> None:
        """Rotate the pairs of elements of queries and keys by these angles per token, and multiply both by
        `scale`."""
        self.rotary_pos_emb.inv_freq = self.rotary_pos_emb.inv_freq.new_tensor(angles)
        self._rotary_scale = scale

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
        if embedded is not None:
            # torch.matmul multiplies [T, 1, H] by a frozen weight as one matrix only if the strides are those
            # of a new tensor, and else rounds otherwise than by a trained weight, as the reference would.
            embedded = embedded.flatten(0, 1)[:, None]
        if not self._rotates_in_attention:
            return embedded, angles, *rest
        of_token = angles[kwargs["position_ids"][0], 0]
        kwargs["packed_seq_params"].rotation = Rotation.of(
            of_token, self.config.params_dtype, self._rotary_scale
        )
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
        if microbatch.keys is None:
            selected = hidden[:, 0].index_select(0, microbatch.hidden_index_T)
        else:  # several action tokens may read one token that their trajectories share
            selected = Chosen.apply(hidden[:, 0], microbatch.hidden_index_T)
        return self.output_layer(selected) if isinstance(self.output_layer, ValueHead) else selected

    def vocabulary_weight(self) -> Tensor | None:
        """Return the weight of the policy head, [V/TP, H], tied or not; None except on the last pipeline
        stage."""
        if not self.post_process:
            return None
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


def share(chunk: TokenModel, trunk: TokenModel) -> None:
    """Replace every parameter of a chunk that was built on the meta device by the trunk's own parameter, so
    that several models of a rank have one set of frozen weights.

    trunk: the actor's chunk with the same layers. Its embedding is the head too if they are tied.
    """
    given = dict(trunk.named_parameters())
    for name, _ in list(chunk.named_parameters()):
        owner, _, last = name.rpartition(".")
        weight = given.get(name, trunk.vocabulary_weight() if name == "output_layer.weight" else None)
        assert isinstance(weight, torch.nn.Parameter), name
        setattr(chunk.get_submodule(owner), last, weight)
    # The chunk computed its frequencies on the CPU, whose pow rounds differently from that of a GPU: on the
    # same weights the reference would otherwise not have the actor's log-probs bit for bit.
    chunk.rotary_pos_emb.inv_freq = trunk.rotary_pos_emb.inv_freq


def frozen(model: Sequence[torch.nn.Module]) -> Iterable[Tensor]:
    """Return the parameters of a model that are not trained."""
    return [weight for chunk in model for weight in chunk.parameters() if not weight.requires_grad]
