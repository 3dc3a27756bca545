"""What commands share: arguments, help texts, and what they do before they import torch: read and check the
configuration, lock the run's folder."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.cluster.exits import is_first_rank
from megatron_stppo.cluster.launch import connections, process
from megatron_stppo.observe.console import say, timed

if TYPE_CHECKING:
    from megatron_stppo.base.types import Task
    from megatron_stppo.config import Config


File = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.field=value]...", help="values that override the file", show_default=False
    ),
]
Modules = Annotated[
    Path | None,
    typer.Option(
        show_default=False, help="folder of the modules that fields name; default: that of CONFIG.yaml"
    ),
]


def command_group(about: str | None = None, epilog: str | None = None) -> typer.Typer:
    """Return a Typer to which commands are added, with plain text as help and Python's own tracebacks."""
    return typer.Typer(
        help=about,
        epilog=epilog,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,  # its tracebacks print local variables, secrets among them
        rich_markup_mode=None,
    )


def examples(*lines: str) -> str:
    """Return the end of a help text, in which every line stays as it is written."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def open_config(
    path: Path,
    overrides: list[str] | None,
    command: str,
    resume: bool = False,
    world: int | None = None,
    checkpoint: bool = False,
    modules: Path | None = None,
) -> Config:
    """Return the configuration after all checks of `command` that need neither torch nor the model's weights.

    `world`: number of ranks; default: the launcher's. checkpoint: whether the command loads a checkpoint and
    trains nothing, so that it needs no model.lora.path. modules: the folder of the modules that `environment`
    names; default: that of the file. Raises ConfigError.
    """
    from megatron_stppo.config.file import load

    if world is None:
        process.discover()
    config = load(path, overrides).beside(modules or path.parent)
    from megatron_stppo.validation import checks, lora, model_folder, model_layout, run_folder

    if checkpoint and command in ("convert", "evaluate"):  # of the run itself
        config = run_folder.with_own_model(config, overrides or [])
    from megatron_stppo.weights.sharding.hf_names import read_shape

    ranks = world or int(os.environ.get("WORLD_SIZE", "1"))
    if command in ("convert", "audit"):
        config = model_layout.with_fitting_layout(config, ranks)
    checked = config.of_checkpoint() if checkpoint else config
    checks.check(checked, ranks, command)
    for note in (
        lora.base_note(checked),
        model_folder.left_out(config.model.path, read_shape(config.model.path)),
    ):
        if note:
            say(note, is_first_rank())
    if command == "train" and resume:
        run_folder.check_resume(config)
    elif command == "train":
        run_folder.check_new(config, "give --resume to continue that run, or another run.name")
    _read_tasks(config, checks.data_files(config, command))
    if checks.plays(config, command):
        from megatron_stppo.environments import choose

        choose.check(config.environment, resume)
    if world is None:
        generations = connections.gpu_generations()
        if warning := connections.keep_order(os.environ, config.parallel, generations):
            say(warning, is_first_rank())
    return config


@contextmanager
def importing(checked: Config | None = None, quiet: bool = False, **device: Any) -> Iterator[None]:
    """Set up the process for torch, megatron-core and vLLM, and import them without garbage collection.

    checked: a configuration that process.check then checks. quiet: do not print how long it took. device:
    arguments of process.prepare. The imports create over a million objects that stay. Without collections
    they take a quarter less processor time, and a later collection does not look at these objects, which
    would take 0.3 s. Raises ConfigError.
    """
    gc.disable()
    try:
        with timed("importing", is_first_rank() and not quiet):
            process.prepare(**device)
            if checked is not None:
                process.check(checked)
            yield
    finally:
        gc.freeze()
        gc.enable()


def _read_tasks(config: Config, fields: tuple[str, ...]) -> None:
    """Read every row, so that a malformed one is found before anything is written."""
    if given := {"train", "evaluate"} & set(fields):
        from megatron_stppo.data import tasks

        read = {field: tasks.read(getattr(config.data, field)) for field in sorted(given)}
        for warning in _doubtful(config, read):
            say(warning, is_first_rank())


def _doubtful(config: Config, read: Mapping[str, Sequence[Task]]) -> Iterator[str]:
    """Yield a warning for each property of the tasks that is rarely intended."""
    from megatron_stppo.data import tasks

    data, drawn = config.data, config.rollout.tasks_per_iteration
    trained, held = read.get("train", ()), read.get("evaluate", ())
    if "train" in read and len(trained) < drawn:
        yield (
            f"data.train={data.train}: holds {len(trained)} tasks, fewer than "
            f"rollout.tasks_per_iteration={drawn}: every iteration plays a task several times; add tasks, or "
            f"set rollout.tasks_per_iteration={len(trained)} and more samples_per_task"
        )
    played = config.evaluate
    if "evaluate" in read and played.samples > 1 and played.temperature == 0:
        yield (
            f"evaluate.samples={played.samples} with evaluate.temperature=0: the model answers greedily, so "
            "that the episodes of a task differ only if its environment is random; set evaluate.samples=1, "
            "or a temperature above 0"
        )
    if data.train != data.evaluate and (both := tasks.shared(trained, held)):
        yield (
            f"data.evaluate={data.evaluate}: {both} of {len(held)} tasks are also in "
            f"data.train={data.train}, with the same prompt and target: evaluations do not measure held-out "
            "tasks; remove them from one of the files"
        )


def lock(config: Config) -> None:
    """Reserve the run's folder for this process. Raises ConfigError if another process writes it."""
    if is_first_rank():
        from megatron_stppo.cluster import run_lock

        try:
            run_lock.take(config)
        except OSError as error:
            raise ConfigError(
                f"run.root={config.run.root}: {config.run.folder} cannot be written ({error.strerror}); name "
                "a folder that you may write to"
            ) from None
