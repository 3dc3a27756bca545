"""The tasks of a data file that a run can play: those whose prompts are not too long.

Prompts are measured once, before a model is loaded. A task with a longer prompt is left out of the run: no
episode of it can be played, and it would count as a failed one in every epoch.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatron_stppo.base.types import Task
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data import tasks
from megatron_stppo.data.text.chat import encode_chats, render_prompt
from megatron_stppo.environments import choose
from megatron_stppo.observe.console import say
from megatron_stppo.observe.metrics import counting
from megatron_stppo.rollout.episodes.episode import Limits
from megatron_stppo.weights.sharding.hf_load import load_tokenizer

SEED = 1_000_000_007  # of the sample of held-out tasks
CHUNK = 256  # prompts that are encoded together
MANY = 10_000  # prompts that take seconds; progress is shown
T = TypeVar("T")


@dataclass(frozen=True)
class FittingTasks:
    """Tasks of a file. Example: of 40 tasks, 4 of which are too long, FittingTasks(tasks, 4) has 36."""

    tasks: tuple[Task, ...]  # at least one, in the order of the file
    overlong: int = 0  # tasks that were left out, because their prompts are too long


def fitting_tasks(config: Config, field: Literal["train", "evaluate"], *, shown: bool) -> FittingTasks:
    """Return the tasks of data.train, or the sample of data.evaluate, whose prompts can be played.

    The prompt of a row is measured, as the model's chat template renders it; an agent's is not, because the
    agent sends its own. Equal on all ranks, without communication. shown: print how many tasks are left out,
    and progress if it takes long.
    Raises ConfigError if no prompt is short enough, and for a prompt that the template rejects.
    """
    path: Path = getattr(config.data, field)
    rows = sample(
        list(enumerate(tasks.read(path), 1)), config.evaluate.tasks if field == "evaluate" else None
    )
    every = tuple(task for _, task in rows)
    if config.environment.kind == choose.AGENT:
        return FittingTasks(every)
    tokenizer = load_tokenizer(config.model.path, config.model.template_arguments)
    limit, named = Limits.of(config).prompt
    lengths: list[int] = []
    with counting(f"prompts of data.{field}", shown and len(rows) >= MANY) as show:
        for start in range(0, len(rows), CHUNK):
            lengths += _lengths(tokenizer, rows[start : start + CHUNK], limit, f"data.{field}={path}")
            show(len(lengths), len(rows))
    fitting = tuple(task for task, length in zip(every, lengths, strict=True) if length <= limit)
    where, longer = f"data.{field}={path}", f"prompts are longer than {named} allows"
    if not fitting:
        raise ConfigError(
            f"{where}: all {len(every)} {longer} (the shortest has {min(lengths)} tokens); raise the limit, "
            "or shorten the prompts"
        )
    if overlong := len(every) - len(fitting):
        left_out = f"their tasks are left out (the longest has {max(lengths)} tokens)"
        say(f"{where}: {overlong} of {len(every)} {longer}; {left_out}", shown)
    return FittingTasks(fitting, overlong)


def sample(given: Sequence[T], count: int | None) -> Sequence[T]:
    """Return `count` random ones, always the same, in file order: files are often sorted by data set."""
    if count is None or count >= len(given):
        return given
    chosen = sorted(random.Random(SEED).sample(range(len(given)), count))
    return [given[i] for i in chosen]


def _lengths(tokenizer: Any, rows: Sequence[tuple[int, Task]], limit: int, where: str) -> list[int]:
    """Return the number of tokens of each prompt; of one that cannot exceed the limit, an upper bound.

    A token of ASCII text has at least one character, and at most one further token precedes the text. So most
    prompts are only rendered: encoding them takes several times as long.
    """
    lengths = []
    for number, task in rows:
        try:
            text = render_prompt(tokenizer, [message.as_dict() for message in task.prompt])
        except ConfigError as error:
            raise ConfigError(f"{where} row {number}: {error}") from None
        lengths.append(len(text) + 1 if text.isascii() else limit + 1)
    long = [place for place, length in enumerate(lengths) if length > limit]
    encoded = encode_chats(tokenizer, [rows[place][1].prompt for place in long]) if long else []
    for place, ids in zip(long, encoded, strict=True):
        lengths[place] = len(ids)
    return lengths
