"""Functions that run on a rank: two steps, a checkpoint, and a third step in the same and another layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron_stppo.cluster.launch import process
from tests.training.update.adapting import write
from tests.training.update.layouts import SETTINGS, batch


def three_steps(root: str, moves: list[tuple[str, dict[str, Any], dict[str, Any], int, str]]) -> list[int]:
    """Run all moves (model's folder under `root`, layout before, layout after, rank of adapters or 0, type).

    For move n, `root`/n gets the Hugging Face folders saved, loaded, stayed and moved, with adapters only
    these, and the checkpoints of step 1: pieces; gathered, which has megatron's format fully_reshardable; and
    pieces_again and gathered_again, which are written right after these are loaded in the other layout.
    Return the number of updates counted after each load.
    """
    process.prepare(engine=False)
    import torch

    from megatron_stppo.checkpoint import saving
    from megatron_stppo.checkpoint.convert import export_hf
    from megatron_stppo.config import Config
    from megatron_stppo.model import build
    from megatron_stppo.model.pipeline import packer_of
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.parallel import groups
    from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights
    from megatron_stppo.weights.sharding.hf_names import read_shape
    from megatron_stppo.weights.sharding.spans import training_layouts

    torch.set_num_threads(1)
    given, counted = batch(), []

    def start(parallel: dict[str, Any], dtype: str) -> tuple[Any, ...]:
        settings = {"path": model, "lora": {"rank": rank}}, parallel, {"actor": SETTINGS}
        config = Config.model_validate(dict(zip(("model", "parallel", "update"), settings, strict=True)))
        mesh = groups.replace(config.parallel)
        actor = build.trainer("actor", shape, config, mesh, getattr(torch, dtype))
        return config, mesh, actor

    def step(config: Any, mesh: Any, actor: Any, chosen: list[int]) -> None:
        head = PolicyHead.of(actor.model, mesh, shape.vocab, segments=config.algorithm.segments)
        loss = ActorLoss(given, minibatch_weights(given, chosen, config.algorithm), config.algorithm, head)
        packer = packer_of(config, shape, mesh)
        actor_step(actor, loss, packer.divide(given, chosen), packer)

    def save(name: str, config: Any, mesh: Any, actor: Any) -> None:
        saver = saving.Saver(folder / name, config, mesh.layout)
        saver.save(1, {"actor": actor}, {"iteration": 1})
        saver.finish()

    def export(name: str, mesh: Any, actor: Any) -> None:
        if rank:
            (folder / name).mkdir(parents=True, exist_ok=True)
            weights = build.named_parameters(actor.chunks)
            return write(folder / name / "model.safetensors", weights, shape, config, mesh)
        layouts = training_layouts(shape, mesh.layout)
        export_hf(folder / name, build.named_parameters(actor.chunks), layouts, shape, Path(model))

    for number, (family, before, after, rank, dtype) in enumerate(moves):
        folder, model = Path(root) / str(number), f"{root}/{family}"
        shape = read_shape(Path(model))
        config, mesh, actor = start(before, dtype)
        step(config, mesh, actor, [0, 1, 2, 3])
        step(config, mesh, actor, [4, 5, 6, 7])
        save("pieces", config, mesh, actor)
        # megatron's function (0.16.1) mistakes the states of parameters of two types for each other
        types = {parameter.dtype for chunk in actor.chunks for parameter in chunk.parameters()}
        other = gathered if len(types) == 1 else saving.saved_tensors
        with patch.object(saving, "saved_tensors", other):
            save("gathered", config, mesh, actor)
        export("saved", mesh, actor)
        step(config, mesh, actor, [1, 3, 5, 7])
        export("stayed", mesh, actor)

        for name in ("gathered", "pieces"):
            config, mesh, actor = start(after, dtype)
            saver = saving.Saver(folder / name, config, mesh.layout)
            if rank:
                refuse_others(saver, actor, Path(f"{root}/other"))
            saver.load({"actor": actor})
            counted.append(actor.updates)
            save(f"{name}_again", config, mesh, actor)
        export("loaded", mesh, actor)
        step(config, mesh, actor, [1, 3, 5, 7])
        export("moved", mesh, actor)
    return counted


def gathered(trainer: Any, is_loading: bool) -> dict[str, Any]:
    """Return what megatron saves of a trainer, as this program did up to commit e51093e."""
    from megatron_stppo.checkpoint.contents import saved_weights

    model = saved_weights(trainer.chunks)
    kind = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    states = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=kind)
    return {"model": model, "optimizer": states}


def refuse_others(saver: Any, actor: Any, other: Path) -> None:
    """Check that the checkpoint is not loaded into adapters of another rank, nor of other weights, nor into a
    run that begins with other adapters."""
    import pytest

    from megatron_stppo.config import ConfigError

    own, chunk = actor.chunks[0].adaptation, actor.chunks[0]
    for changed, message in (
        (replace(own, rank=3), r"step_1: was written with model.lora.rank=4, this run has 3; set"),
        (
            replace(own, folder=other),
            r"step_1: its adapters belong to other weights than those of model.path",
        ),
        (replace(own, initial="0" * 64), "step_1: its run began with other adapters than those"),
        (None, r"step_1: was written with model.lora.rank=4, this run has 0; set"),
    ):
        chunk.adaptation = changed
        with pytest.raises(ConfigError, match=message):
            saver.load({"actor": actor})
    chunk.adaptation = own
