"""Runs on a rank: what a step does with a number that is not finite, and what a load does with damaged
files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stppo.runtime import launch
from tests.update.layouts import SETTINGS, batch


def trainer(model: str, tensor: int) -> tuple[Any, ...]:
    launch.prepare(engine=False)
    import torch

    from megatron_stppo.config import Config
    from megatron_stppo.model import build
    from megatron_stppo.model.hf_names import read_shape
    from megatron_stppo.parallel import groups

    config = Config.model_validate(
        {"model": {"path": model}, "parallel": {"tensor": tensor}, "update": {"actor": SETTINGS}}
    )
    place = groups.initialize(config.parallel)
    shape = read_shape(Path(model))
    return build.trainer("actor", shape, config, place, torch.float32), config, place, shape


def state_of(actor: Any) -> list[Any]:
    """Copies of weights and of everything Adam keeps."""
    tensors = [p.detach().clone() for chunk in actor.model for p in chunk.parameters()]
    for wrapped in actor.optimizer.chained_optimizers:
        tensors += [t.clone() for state in wrapped.optimizer.state.values() for t in state.values()]
    return tensors


def step_on_nan(model: str) -> tuple[float, bool, int]:
    """(skipped, untouched, refused steps): one advantage on the second data-parallel rank's part is NaN."""
    actor, config, place, shape = trainer(model, 1)
    import torch

    from megatron_stppo.model.pipeline import Packer
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.update.actor_step import ActorLoss, actor_step, minibatch_weights

    given, chosen, packer = batch(), list(range(8)), Packer.of(config, shape, place)
    on_second = packer.hands(given, chosen)[1][0]
    assert given.advantage_T is not None
    given.advantage_T[given.action_offsets[on_second]] = float("nan")
    before = state_of(actor)
    a = config.algorithm
    head = PolicyHead.of(actor.model, place, shape.vocab, segments=a.segments)
    loss = ActorLoss(given, minibatch_weights(given, chosen, a), a, head)
    numbers = actor_step(actor, loss, chosen, packer)
    untouched = all(torch.equal(x, y) for x, y in zip(before, state_of(actor), strict=True))
    return numbers["actor/skipped"], untouched, actor.skipped


def load_after_damage(model: str, folder: str) -> tuple[int, str]:
    """(the step that is read after a byte of the newest was flipped, the complaint once both are damaged)."""
    actor, config, place, _ = trainer(model, 1)
    from megatron_stppo.model import checkpoint

    saver = checkpoint.Saver(Path(folder), config, place.layout)
    for step in (1, 2):
        saver.save(step, {"actor": actor}, {"iteration": step})
    saver.finish()
    flip(Path(folder) / "step_2")
    state = saver.load({"actor": actor})
    assert state is not None
    flip(Path(folder) / "step_1")
    try:
        saver.load({"actor": actor})
    except checkpoint.CheckpointError as error:
        return state["iteration"], str(error)
    return state["iteration"], ""


def flip(step: Path) -> None:
    path = next(step.glob("actor/*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
