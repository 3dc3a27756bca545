"""Describes the tensors of a checkpoint: weights and optimizer states, with their names in the files.

The names are those of the whole model, whichever rank and chunk holds a tensor, so that a checkpoint can be
loaded with another layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_stppo.checkpoint.state_pieces import state_pieces
from megatron_stppo.model.adapters import sharded_adapters
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.token_model import TokenModel


def saved_tensors(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    """Return the sharded tensors of a trainer: its weights and its optimizer's states.

    is_loading: whether they are to be filled from a checkpoint.
    """
    model = saved_weights(trainer.chunks)
    if trainer.settings.distributed:
        return {"model": model, "pieces": state_pieces(trainer.optimizer, model)}
    # the same names in the files, whether or not experts have an optimizer of their own
    names = {"chained_optim_avoid_prefix": True}
    whole = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=names)
    return {"model": model, "optimizer": whole}


def saved_weights(model: Sequence[TokenModel]) -> dict[str, Any]:
    """Return the sharded tensors of every chunk, with adapters only these. In the files they are named as in
    the whole model, whichever rank and chunk holds them."""
    return {
        f"chunk_{number}": sharded_adapters(chunk) if chunk.adaptation else chunk.sharded_state_dict()
        for number, chunk in enumerate(model)
    }


def fill(model: Sequence[TokenModel], loaded: dict[str, Any]) -> None:
    """Load the tensors of `saved_weights`, read from a checkpoint, into the chunks of a model."""
    for number, chunk in enumerate(model):
        tensors = loaded[f"chunk_{number}"]
        missing = set(chunk.load_state_dict(tensors, strict=not chunk.adaptation).missing_keys)
        assert not [n for n, p in chunk.named_parameters() if p.requires_grad and n in missing]
