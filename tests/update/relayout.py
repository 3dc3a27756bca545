"""Runs on a rank: two steps under one layout, a checkpoint, a third step there and under another layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from megatron_stppo.runtime import launch
from tests.update.layouts import SETTINGS, batch


def three_steps(root: str, moves: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[int]:
    """Of move n (model's folder under `root`, before, after), `root`/n has Hugging Face folders: saved,
    loaded, stayed and moved. Returns the number of updates counted after each load."""
    launch.prepare(engine=False)
    import torch
    import torch.distributed as dist

    from megatron_stppo.config import Config
    from megatron_stppo.convert import export_hf
    from megatron_stppo.model import build, checkpoint
    from megatron_stppo.model.hf_names import read_shape
    from megatron_stppo.model.pipeline import Packer
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.model.spans import training_layouts
    from megatron_stppo.parallel import groups
    from megatron_stppo.update.actor_step import ActorLoss, actor_step, minibatch_weights

    torch.set_num_threads(1)
    given, counted = batch(), []

    def start(parallel: dict[str, Any]) -> tuple[Any, ...]:
        settings = {"path": model}, parallel, {"actor": SETTINGS}
        config = Config.model_validate(dict(zip(("model", "parallel", "update"), settings, strict=True)))
        place = groups.replace(config.parallel)
        actor = build.trainer("actor", shape, config, place, torch.float32)
        return config, place, actor

    def step(config: Any, place: Any, actor: Any, chosen: list[int]) -> None:
        head = PolicyHead.of(actor.model, place, shape.vocab, segments=config.algorithm.segments)
        loss = ActorLoss(given, minibatch_weights(given, chosen, config.algorithm), config.algorithm, head)
        actor_step(actor, loss, chosen, Packer.of(config, shape, place))

    def export(name: str, place: Any, actor: Any) -> None:
        layouts = training_layouts(shape, place.layout)
        export_hf(folder / name, build.named_parameters(actor.chunks), layouts, shape, Path(model))

    for number, (family, before, after) in enumerate(moves):
        folder, model = Path(root) / str(number), f"{root}/{family}"
        shape = read_shape(Path(model))
        config, place, actor = start(before)
        step(config, place, actor, [0, 1, 2, 3])
        step(config, place, actor, [4, 5, 6, 7])
        saver = checkpoint.Saver(folder / "checkpoints", config, place.layout)
        saver.save(1, {"actor": actor}, {"iteration": 1})
        saver.finish()
        export("saved", place, actor)
        step(config, place, actor, [1, 3, 5, 7])
        export("stayed", place, actor)

        config, place, actor = start(after)
        checkpoint.Saver(folder / "checkpoints", config, place.layout).load({"actor": actor})
        counted.append(actor.updates)
        export("loaded", place, actor)
        step(config, place, actor, [1, 3, 5, 7])
        export("moved", place, actor)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "checkpoints")
    return counted
