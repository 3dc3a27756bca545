"""The command `cold-start`: train a language model on scripted trajectories before reinforcement learning.

Reinforcement learning can only select among skills that the model has; the cold start teaches these skills.
The loss is on every token but the first, observations included: a small model learns to copy names from
documents only if it also learns what documents look like. (The loss of reinforcement learning is on action
tokens only.) Prompts and observations have the weight `cold_start.context_weight`: names and values in them
cannot be predicted, and at the full weight this noise is most of the gradient.
"""

import gc
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from megatron_stppo.base.errors import DoNotRestart, TooManyFailures
from megatron_stppo.base.files import unused
from megatron_stppo.base.types import Batch, Task, Trajectory, Turn
from megatron_stppo.checkpoint.convert import export_hf, export_peft
from megatron_stppo.cluster.exits import is_first_rank
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ConfigError, OptimizerConfig
from megatron_stppo.data import demonstrations
from megatron_stppo.data.demonstrations import Demonstration
from megatron_stppo.data.division import Packer
from megatron_stppo.data.packing import Microbatch, to_batch
from megatron_stppo.model import build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import forward_backward, packer_of, total
from megatron_stppo.model.policy_head import ActionTokens, PolicyHead
from megatron_stppo.observe.console import say, timed
from megatron_stppo.observe.metrics import progress
from megatron_stppo.ops.extension import to_device
from megatron_stppo.parallel.collectives import broadcast_bytes
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.weights.sharding.hf_load import load_tokenizer
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape
from megatron_stppo.weights.sharding.spans import training_layouts

if TYPE_CHECKING:
    from megatron_stppo.training.play_only import ColdEpisodes

Item = TypeVar("Item")
OpenEpisodes = Callable[[Config, MeshRank, Any], "ColdEpisodes"]
SCRIPT = Task("demonstrations", (), ("",), "train", 0)


def cold_start(config: Config, open_episodes: OpenEpisodes | None = None) -> None:
    """Train model.path on data.demonstrations, and write a Hugging Face folder to cold_start.output.

    With model.lora only adapters are trained, and the folder has these, in the format of the package peft.
    open_episodes: opens the environment, which says how turns end, and plays at the end with what was
    written; None: neither. Raises ConfigError.
    """
    settings, data = config.cold_start, config.data.demonstrations
    assert data is not None, "validation/checks.py requires it"
    tokenizer = load_tokenizer(config.model.path, config.model.template_arguments)
    mesh = process.start(config)
    first_rank = mesh.rank == 0
    episodes = open_episodes(config, mesh, tokenizer) if open_episodes is not None else None
    if episodes is None:
        why = "data.train=null" if settings.episodes else "cold_start.episodes=0"
        say(f"{why}: the ends of turns are not checked, and no episodes are played at the end", first_rank)
    unended = episodes.unended if episodes is not None else lambda turn: ""
    scripts = demonstrations.read(data, tokenizer, settings.tokens or sys.maxsize, unended)
    output = _train(config, mesh, scripts)
    if episodes is None:
        return process.stop()
    gc.collect()  # the engine needs the memory of the training
    torch.cuda.empty_cache()
    try:
        episodes.play(output)
    except TooManyFailures as error:
        raise TooManyFailures(
            f"{error}; what was trained is complete in {output}, only the episodes with it failed"
        ) from error


def _train(config: Config, mesh: MeshRank, scripts: list[Demonstration]) -> Path:
    """Train on the scripts and write what was trained. Return its folder."""
    settings, shape, first_rank = config.cold_start, read_shape(config.model.path), mesh.rank == 0
    steps = list(by_tokens(scripts, len, settings.batch_tokens, mesh.data_size))
    if not steps:
        raise ConfigError(
            f"data.demonstrations={config.data.demonstrations}: {len(scripts)} rows are read, and each of "
            f"the {mesh.data_size} data-parallel ranks needs one; give more rows, more cold_start.tokens, or "
            "fewer ranks"
        )
    with timed("model", first_rank):
        model = build.data_parallel(
            build.from_hf("actor", shape, config, mesh, process.dtype(config)), distributed_optimizer=True
        )
    optimizer = OptimizerConfig(
        lr=settings.lr, weight_decay=settings.weight_decay, grad_clip=settings.grad_clip
    )
    trainer = Trainer(model, optimizer, len(steps))
    packer = packer_of(config, shape, mesh)
    float32_logits = config.model.float32_logits(torch.cuda.is_available())
    rows = config.update.logit_rows
    head = PolicyHead.of(model, mesh, shape.vocab, chunk=rows, float32_logits=float32_logits)
    for step, taught in enumerate(progress(steps, "cold start", first_rank, every=None)):
        rate = _cosine(step, len(steps), settings.warmup_fraction)
        loss, of_turns = train_step(trainer, head, taught, settings.context_weight, mesh, packer, rate)
        check_refused(trainer, config.run.nonfinite_budget, len(steps), "cold_start.lr")
        if step % 20 == 0 or step == len(steps) - 1:
            shown = f"loss {loss:.3f} nats/token, {of_turns:.3f} of turns alone"
            say(f"cold start {step + 1}/{len(steps)}: {shown}", first_rank)
    output = free_output(config)
    say(f"done; {export(output, trainer, config, shape, mesh)}", first_rank)
    return output


def free_output(config: Config) -> Path:
    """Return cold_start.output, or a name beside it if that has appeared during the training.

    Collective. What was trained is neither lost nor written over something else.
    """
    output = config.cold_start.output
    assert output is not None, "validation/checks.py requires it"
    free = Path(os.fsdecode(broadcast_bytes(os.fsencode(unused(output)), 0)))
    if free != output:
        say(f"cold_start.output={output}: exists since the training began; {free} is used", is_first_rank())
    return free


def check_refused(trainer: Trainer, budget: int, steps: int, rate: str) -> None:
    """Raise DoNotRestart if more than `budget` or all steps were not finite. All ranks raise together.

    rate: the field of the learning rate.
    """
    if trainer.skipped > budget or trainer.skipped == steps:
        raise DoNotRestart(
            f"{trainer.skipped} of {steps} steps were not finite, run.nonfinite_budget={budget}; nothing is "
            f"written; lower {rate}"
        )


def export(output: Path, trainer: Trainer, config: Config, shape: ModelShape, mesh: MeshRank) -> str:
    """Write what was trained, and return a sentence that says what that is. Collective."""
    trained, base = build.named_parameters(trainer.chunks), config.model.path
    if config.model.lora.rank:
        size = export_peft(output, trained, shape, config, mesh)
        return f"the adapters ({size}) are {output}; train with model.lora.path={output} model.path={base}"
    layouts = training_layouts(shape, mesh.layout, spec=layer_spec(config))
    export_hf(output, trained, layouts, shape, base)
    return f"the model is {output}"


def by_tokens(
    items: Iterable[Item], tokens_of: Callable[[Item], int], budget: int, ranks: int
) -> Iterator[list[Item]]:
    """Yield the items of each step, in order: up to `budget` tokens, but at least one item per rank."""
    step: list[Item] = []
    tokens = 0
    for item in items:
        if len(step) >= ranks and tokens + tokens_of(item) > budget:
            yield step
            step, tokens = [], 0
        step.append(item)
        tokens += tokens_of(item)
    if len(step) >= ranks:  # a last step too small for every rank is dropped
        yield step


def as_batch(scripts: list[Demonstration]) -> Batch:
    """Return a batch in which each script is one long turn after a prompt of one token."""
    every = [(script.token_ids, len(script.token_ids) - 1) for script in scripts]
    turns = [Turn(ids[1:], (0.0,) * size, (), 0.0, ((0, size),)) for ids, size in every]
    pairs = zip(every, turns, strict=True)
    return to_batch([Trajectory(SCRIPT, ids[:1], (turn,), "ok") for (ids, _), turn in pairs])


def train_step(
    trainer: Trainer,
    head: PolicyHead,
    scripts: list[Demonstration],
    context_weight: float,
    mesh: MeshRank,
    packer: Packer,
    rate: float,
) -> tuple[float, float]:
    """Make an optimizer step. Return its loss and the loss of the turns alone, in nats per unit of weight.

    A token has the weight 1 in the loss if it is written by the model, else context_weight.
    """
    batch = as_batch(scripts)
    written_T = torch.tensor([written for script in scripts for written in script.written[1:]])
    weights = (torch.where(written_T, 1.0, context_weight), written_T.float())
    parts = [(weight_T, float(weight_T.sum())) for weight_T in weights]
    loss = partial(_loss, head=head, parts=parts)
    trainer.zero()
    records = forward_backward(trainer.model, packer.pack(batch, packer.whole(batch)), loss)
    trainer.step(trainer.reduce(), rate_scale=rate)
    of_all, of_turns = total(records, 2, mesh).tolist()
    return of_all, of_turns


def _loss(
    hidden: Tensor, microbatch: Microbatch, head: PolicyHead, parts: Sequence[tuple[Tensor, float]]
) -> tuple[Tensor, Tensor]:
    """parts: the weights of the loss that is trained, [T], and their sum; the same of the one of turns."""

    def terms(chunk: ActionTokens) -> tuple[Tensor, Tensor]:
        losses = [mean(chunk, *part) for part in parts]
        return losses[0], torch.stack(losses).detach()

    def mean(chunk: ActionTokens, weight_T: Tensor, total_weight: float) -> Tensor:
        own_T = to_device(weight_T[chunk.rows_T], chunk.logprob_T.device)
        return -(chunk.logprob_T * own_T).sum() / max(total_weight, 1e-9)

    loss, record, _ = head.loss(hidden, microbatch, terms)
    return loss, record


def _cosine(step: int, steps: int, warmup_fraction: float) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine from 1 to 0.1."""
    warmup = max(1, math.ceil(warmup_fraction * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
