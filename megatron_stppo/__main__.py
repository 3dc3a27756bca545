"""The door: parses the command line, checks what can be checked without a model, and starts a stage.

Imports are lazy here, against the rule of the house: --help must not wait for torch.

Exit codes: 0 done, 2 bad usage or configuration, 85 checkpointed for requeue, 93 do not restart, anything
else a crash.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_stppo import __version__
from megatron_stppo.exits import exit_code, is_first_rank, noting_the_end, report_to_torchrun, say

if TYPE_CHECKING:
    from megatron_stppo.config import Config


def _examples(*lines: str) -> str:
    """The end of a help text; each line as it is written."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


app = typer.Typer(
    help="ST-PPO for very large multi-turn LLM agents, on megatron-core and vLLM.",
    epilog=_examples(
        "megatron-stppo init my-project            a new project that trains at once on a CPU",
        "megatron-stppo train config.yaml          one process",
        "torchrun --standalone --nproc-per-node 8 -m megatron_stppo train config.yaml",
        "megatron-stppo train config.yaml run.name=second update.actor.lr=1e-5",
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks print local variables, secrets among them
    rich_markup_mode=None,
)
convert_app = typer.Typer(
    help="Between a run's checkpoints and Hugging Face folders.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(convert_app, name="convert")

File = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", show_default=False)]
Replay = Literal["rollouts", "batches"]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.field=value]...", help="override the file", show_default=False),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.field=value", help="the same; may be repeated"),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatron-stppo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit"),
    ] = False,
) -> None:
    """The options of the program itself."""


@app.command(
    epilog=_examples(
        "megatron-stppo train config.yaml",
        "megatron-stppo train config.yaml run.name=second update.actor.lr=1e-5",
        "megatron-stppo train config.yaml --resume",
        "torchrun --standalone --nproc-per-node 8 -m megatron_stppo train config.yaml",
        "megatron-stppo train config.yaml run.name=again --replay rollouts --from runs/first",
    )
)
def train(
    config: File,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option(help="continue a run that is there, from its newest checkpoint")
    ] = False,
    replay: Annotated[
        Replay | None, typer.Option(help="train on what the run --from recorded, without an engine")
    ] = None,
    source: Annotated[Path | None, typer.Option("--from", help="folder of the run to replay")] = None,
    start: Annotated[
        str | None, typer.Option(help="its checkpoint to start from, step_N or latest; default: model.path")
    ] = None,
) -> None:
    """Train with reinforcement learning; one process, or one per device under torchrun or srun."""
    if replay or source or start:
        return _replay(config, overrides, resume, replay, source, start)
    settings = _open(config, overrides, "train", resume)
    _lock(settings)
    from megatron_stppo.launch import process
    from megatron_stppo.resilience.preemption import PreemptionNotice
    from megatron_stppo.validation import attempts

    notice = PreemptionNotice(
        settings.run.end_margin
    )  # before the imports that take long: SIGUSR1 would kill
    if resume and is_first_rank():
        attempts.say_changes(settings)
    with _importing():
        process.prepare()
        process.check(settings)
        from megatron_stppo import loop
    from megatron_stppo.resilience.deadlines import Watchdog

    watchdog = Watchdog(settings.run.folder, settings.deadline_by_phase, process.rank(), process.world_size())
    with noting_the_end(settings), watchdog:
        loop.train(settings, resume, watchdog, notice)


def _replay(
    config: Path,
    overrides: list[str] | None,
    resume: bool,
    what: Replay | None,
    source: Path | None,
    start: str | None,
) -> None:
    from megatron_stppo.config import ConfigError

    if what is None:
        raise ConfigError("--from and --start need --replay: give rollouts or batches")
    if source is None:
        raise ConfigError(f"--replay {what} without --from: give the folder of the run to replay")
    if resume:
        raise ConfigError("--resume with --replay: a replay goes on from --start step_N; leave --resume out")
    settings = _open(config, overrides, "replay")
    from megatron_stppo.launch import process
    from megatron_stppo.validation import sources

    sources.check_replay(settings, what, source, start)
    _lock(settings)
    with _importing():
        process.prepare(engine=False)
        process.check(settings)
        from megatron_stppo.commands.replay import replay
    replay(settings, what, source, start)


@app.command(
    epilog=_examples(
        "megatron-stppo rollout config.yaml run.name=played run.iterations=1",
        "megatron-stppo rollout config.yaml run.name=played run.iterations=21 --from runs/first",
    )
)
def rollout(
    config: File,
    overrides: Overrides = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="run whose checkpoint plays; default: model.path"),
    ] = None,
    start: Annotated[str, typer.Option(help="that checkpoint, step_N or latest")] = "latest",
) -> None:
    """Play training episodes and write them down, without a trainer."""
    settings = _open(config, overrides, "rollout")
    from megatron_stppo.launch import process
    from megatron_stppo.validation import run_folder, sources

    if source is None:
        run_folder.check_new(settings)
    else:
        sources.check_source(settings, source, start)
        sources.check_left(settings, source, start)
    _lock(settings)
    with _importing():
        process.prepare()
        process.check(settings)
        from megatron_stppo.commands.rollout import play
    play(settings, source, start)


@app.command(
    epilog=_examples(
        "megatron-stppo evaluate config.yaml",
        "megatron-stppo evaluate config.yaml --checkpoint latest --output after.json",
        "megatron-stppo evaluate config.yaml data.evaluate=other.jsonl evaluate.samples=4",
    )
)
def evaluate(
    config: File,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="step_N, latest, or nothing for model.path itself")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None,
) -> None:
    """Measure exact match on data.evaluate; numbers and episodes go to evaluate/ in the run's folder."""
    settings = _open(config, overrides, "evaluate")
    _check_checkpoint(settings, checkpoint)
    from megatron_stppo.launch import process
    from megatron_stppo.validation import checks

    if output is not None:
        checks.check_folder("--output", output.parent)
    with _importing():
        process.prepare()
        from megatron_stppo.commands import evaluate as stage
    stage.evaluate(settings, checkpoint, output)


@app.command(
    "cold-start",
    epilog=_examples("megatron-stppo cold-start config.yaml cold_start.output=runs/cold-start"),
)
def cold_start(config: File, overrides: Overrides = None) -> None:
    """Teach a model the format from scripted trajectories (data.demonstrations)."""
    settings = _open(config, overrides, "cold-start")
    from megatron_stppo.launch import process

    with _importing():
        process.prepare(engine=False)
        from megatron_stppo.commands import cold_start as stage
    stage.cold_start(settings)


@convert_app.command(
    "to-hf",
    epilog=_examples(
        "megatron-stppo convert to-hf config.yaml latest trained",
        "megatron-stppo convert to-hf config.yaml step_20 trained run.name=second",
    ),
)
def to_hf(
    config: File,
    checkpoint: Annotated[str, typer.Argument(help="step_N or latest, of the run in CONFIG.yaml")],
    output: Annotated[Path, typer.Argument(help="new folder to write")],
    overrides: Overrides = None,
    sets: Sets = None,
) -> None:
    """Write a checkpoint's actor as a Hugging Face folder, on any number of ranks."""
    settings = _open(config, [*(overrides or []), *(sets or [])], "convert")
    _check_checkpoint(settings, checkpoint)
    _check_new(output)
    from megatron_stppo.launch import process

    process.prepare(engine=False)
    from megatron_stppo.commands import convert

    convert.to_hf(settings, checkpoint, output)


@convert_app.command(
    "to-megatron",
    epilog=_examples(
        "megatron-stppo convert to-megatron config.yaml runs/second/checkpoints",
        "megatron-stppo train config.yaml run.name=second --resume",
    ),
)
def to_megatron(
    config: File,
    output: Annotated[Path, typer.Argument(help="checkpoints folder to write")],
    overrides: Overrides = None,
    sets: Sets = None,
) -> None:
    """Write model.path, a Hugging Face folder, as a megatron checkpoint, on any number of ranks."""
    settings = _open(config, [*(overrides or []), *(sets or [])], "convert")
    from megatron_stppo.launch import process

    process.prepare(engine=False)
    from megatron_stppo.commands import convert

    convert.to_megatron(settings, output)


@app.command(
    "check-environment",
    epilog=_examples("PYTHONPATH=. megatron-stppo check-environment guess:factory config.yaml"),
)
def check_environment(
    kind: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="as environment.kind names it")],
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.yaml]", help="its section environment and the tasks of data.train"),
    ] = None,
    overrides: Overrides = None,
    action: Annotated[
        list[str] | None,
        typer.Option(help="what the policy writes in an episode; may be repeated; default: a script"),
    ] = None,
) -> None:
    """Play scripted episodes with your environment, without a model; exit 2 if something is wrong with it."""
    from megatron_stppo.commands.check_environment import check
    from megatron_stppo.config import ConfigError, EnvironmentConfig
    from megatron_stppo.config_file import load
    from megatron_stppo.data import tasks

    settings = load(config, overrides) if config is not None else None
    section = settings.environment if settings is not None else EnvironmentConfig()
    train = settings.data.train if settings is not None else None
    given = tasks.read(train)[:8] if train is not None else ()
    found = check(section.model_copy(update={"kind": kind}), given, action or ())
    if found.problems:
        raise ConfigError("\nmegatron-stppo: ".join(found.problems))
    ends = ", ".join(f"{count} {name}" for name, count in sorted(found.outcomes.items())) or "none ended"
    typer.echo(f"no problem in {found.episodes} episodes, {found.turns} turns: {ends}", err=True)


@app.command("build-index", epilog=_examples("megatron-stppo build-index corpus.jsonl index"))
def build_index(
    corpus: Annotated[Path, typer.Argument(help='.jsonl rows {"id", "contents"}; contents: "Title"\\ntext')],
    index: Annotated[Path, typer.Argument(help="new folder for the BM25 index")],
) -> None:
    """Index a corpus for environment.retrieval.index and serve-retriever."""
    from megatron_stppo.config import ConfigError
    from megatron_stppo.environments.retrieval import BM25Retriever, read_corpus

    if index.exists():
        raise ConfigError(f"index={index}: exists; name a new folder")
    BM25Retriever.build(read_corpus(corpus), index)
    typer.echo(f"{len(BM25Retriever(index))} documents in {index}", err=True)


@app.command(
    "serve-retriever",
    epilog=_examples(
        "megatron-stppo serve-retriever index --port 8000",
        "RETRIEVER_TOKEN=... megatron-stppo serve-retriever index --host 0.0.0.0 --token-env RETRIEVER_TOKEN",
    ),
)
def serve_retriever(
    index: Annotated[Path, typer.Argument(help="folder of a BM25 index")],
    host: Annotated[str, typer.Option(help="anything but the loopback needs --token-env")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    token_env: Annotated[
        str | None, typer.Option(help="environment variable that holds the bearer token")
    ] = None,
) -> None:
    """Serve POST /retrieve over a BM25 index until interrupted."""
    from megatron_stppo.validation.checks import listener_token

    token = listener_token(host, token_env)
    from megatron_stppo.environments import retrieval_server

    def announce() -> None:
        typer.echo(f"POST http://{host}:{port}/retrieve, Ctrl-C ends it", err=True)

    retrieval_server.serve(index, host, port, token, announce)


@app.command(
    "check-invariance",
    epilog=_examples(
        "torchrun --standalone --nproc-per-node 4 -m megatron_stppo check-invariance config.yaml"
    ),
)
def check_invariance(
    config: File,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for what was measured")] = None,
) -> None:
    """Compute one step under every layout that fits the ranks; exit 1 if two of them differ."""
    settings = _open(config, overrides, "check-invariance")
    from megatron_stppo.launch import process

    process.prepare(engine=False)
    from megatron_stppo.layout_check.check import check_invariance as check

    raise typer.Exit(int(check(settings, output) > 0))


@app.command(
    epilog=_examples(
        "megatron-stppo plan config.yaml --gpus 64",
        "megatron-stppo plan config.yaml --gpus 64 parallel.tensor=8 --json",
    )
)
def plan(
    config: File,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the run; none is needed here")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """Dry run: memory per phase, bytes of the reshard and least times on any number of GPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also where there is a GPU: nothing is computed
    settings = _open(config, overrides, "plan", world=gpus)
    from megatron_stppo.launch import process

    process.prepare(engine=False, device="meta")
    from megatron_stppo.plan.dry_run import plan as dry_run
    from megatron_stppo.plan.report import write

    found = dry_run(settings, gpus)
    write(found, as_json)
    if found.broken:
        from megatron_stppo.config import ConfigError

        raise ConfigError("\n".join(found.broken))


@app.command(
    epilog=_examples(
        "megatron-stppo report runs/first",
        "megatron-stppo report runs/first runs/second --output compared.html",
    )
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(help="the page; default: report.html in the run's folder, or here for several runs"),
    ] = None,
    trajectories: Annotated[
        int | None, typer.Option(min=0, help="at most so many episodes of each run; default: 400")
    ] = None,
) -> None:
    """Draw a run, or compare several, as one HTML page that needs nothing but a browser."""
    from megatron_stppo.report import page

    target = output or (runs[0] if len(runs) == 1 else Path()) / page.FILE
    for note in page.draw(runs, target, page.TRAJECTORIES if trajectories is None else trajectories):
        typer.echo(note, err=True)
    typer.echo(target)


@app.command()
def doctor() -> None:
    """Say what is installed, what is missing, and what that costs; exit 1 if the quickstart cannot run."""
    from megatron_stppo.launch import doctor as report

    raise typer.Exit(report.doctor())


@app.command(epilog=_examples("megatron-stppo init my-project"))
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False, help="new or empty folder")],
) -> None:
    """Write a new project: configuration, environment, data, tests and a model that trains on a CPU."""
    from megatron_stppo import init as project

    names = project.write(folder)
    typer.echo(f"wrote {', '.join(names)} to {folder}; now:\n")
    typer.echo(f"    cd {folder}\n    python make_model.py\n    pytest")
    typer.echo("    PYTHONPATH=. megatron-stppo train config.yaml\n\nREADME.md says what to change first.")


for _command in (*app.registered_commands, *convert_app.registered_commands):
    # Without a short_help the list of commands cuts their first sentence where the line ends.
    _command.short_help = (_command.callback.__doc__ or "").strip()


def _open(
    path: Path, overrides: list[str] | None, command: str, resume: bool = False, world: int | None = None
) -> Config:
    """The configuration, after every check that needs no model; `world` instead of the launcher's. Raises
    ConfigError."""
    from megatron_stppo.config_file import load
    from megatron_stppo.launch import process

    if world is None:
        process.discover()
    config = load(path, overrides)
    from megatron_stppo.validation import checks, run_folder

    ranks = world or int(os.environ.get("WORLD_SIZE", "1"))
    if command == "convert":
        config = checks.with_fitting_layout(config, ranks)
    checks.check(config, ranks, command)
    if command == "train" and resume:
        run_folder.check_resume(config)
    elif command == "train":
        run_folder.check_new(config, "give --resume to continue that run, or another run.name")
    _read_tasks(config, checks.data_files(config, command))
    if command in checks.ROLLS_OUT:
        from megatron_stppo.environments import choose

        choose.check(config.environment, resume)
    return config


def _importing() -> AbstractContextManager[None]:
    """Time the imports that take seconds: torch, megatron-core, vLLM."""
    from megatron_stppo.telemetry.console import timed

    return timed("importing", is_first_rank())


def _check_checkpoint(config: Config, checkpoint: str | None) -> None:
    from megatron_stppo.validation import checks

    checks.check_checkpoint(config, checkpoint)


def _check_new(output: Path) -> None:
    from megatron_stppo.config import ConfigError

    if output.exists():
        raise ConfigError(f"output={output}: exists; name a new folder, or remove it")


def _read_tasks(config: Config, fields: tuple[str, ...]) -> None:
    """Every row, so that a malformed one is found before anything is written."""
    if {"train", "evaluate"} & set(fields):
        from megatron_stppo.data import tasks

        for field in fields:
            given, drawn = tasks.read(getattr(config.data, field)), config.rollout.tasks_per_iteration
            if field == "train" and len(given) < drawn and is_first_rank():
                typer.echo(
                    f"megatron-stppo: data.train={config.data.train}: holds {len(given)} tasks, fewer than "
                    f"rollout.tasks_per_iteration={drawn}: every iteration plays a task several times; add "
                    f"tasks, or set rollout.tasks_per_iteration={len(given)} and more samples_per_task",
                    err=True,
                )


def _lock(config: Config) -> None:
    """No other process writes the run's folder from here on. Raises ConfigError if one does."""
    if is_first_rank():
        from megatron_stppo.config import ConfigError
        from megatron_stppo.resilience import run_lock

        try:
            run_lock.take(config)
        except OSError as error:
            raise ConfigError(
                f"run.root={config.run.root}: {config.run.folder} cannot be written ({error.strerror}); name "
                "a folder that you may write to"
            ) from None


def main() -> None:
    """Run the command line. An error that the user can fix becomes one line and an exit code."""
    try:
        app(prog_name="megatron-stppo")  # the same under `python -m megatron_stppo`
    except Exception as error:
        code = exit_code(error)
        report_to_torchrun(f"{type(error).__name__}: {error}" if code is None else f"megatron-stppo: {error}")
        if code is None:
            raise
        say(error)
        sys.exit(code)


if __name__ == "__main__":
    main()
