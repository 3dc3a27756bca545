"""One set of frozen weights for several models of a rank: the actor's, which critic and reference share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_stppo.model.token_model import TokenModel


def share(chunk: TokenModel, trunk: TokenModel) -> None:
    """Replace every parameter of a chunk that was built on the meta device by the trunk's own parameter.

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
