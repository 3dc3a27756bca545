"""The commands `check-environment`, `build-index` and `init`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.commands.open_run import Modules, Overrides, command_group, examples

commands = command_group()
PLAY = "--play"
# The files of a new project: everything that a first run needs, which a user then changes file by file.
TEMPLATE, AGENT = (Path(__file__).parent / "new_project" / name for name in ("template", "agent"))
MAKE_MODEL = TEMPLATE / "make_model.py"  # in every project


class _Turns(TyperCommand):
    """A command of which all arguments after --play are values of --play."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args.index(PLAY) if PLAY in args else len(args)
        turns = [turn for turn in args[first:] if turn != PLAY]
        parsed: list[str] = super().parse_args(ctx, [*args[:first], *(f"{PLAY}={turn}" for turn in turns)])
        return parsed


@commands.command(
    "check-environment",
    cls=_Turns,
    epilog=examples(
        "megatron-stppo check-environment guess:factory config.yaml",
        "megatron-stppo check-environment guess:factory config.yaml --play 5 'is it 3?' 4",
    ),
)
def check_environment(
    kind: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="a value of environment.kind")],
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.yaml]", help="configuration to use: environment and data.train"),
    ] = None,
    overrides: Overrides = None,
    action: Annotated[
        list[str] | None,
        typer.Option(help="action of all turns of an episode; may be repeated; default: a script"),
    ] = None,
    turns: Annotated[
        list[str] | None,
        typer.Option(
            PLAY,
            metavar="TURN...",
            help="turns of one episode, which is shown; the last arguments. With a CONFIG.yaml, the text "
            "that the model reads is shown too",
        ),
    ] = None,
    modules: Modules = None,
) -> None:
    """Play scripted episodes with your environment, without a model; exit 2 if it has a problem."""
    from megatron_stppo.config import EnvironmentConfig
    from megatron_stppo.config.file import load
    from megatron_stppo.data import tasks
    from megatron_stppo.rollout.episodes.check_environment import check, play

    settings = None if config is None else load(config, overrides).beside(modules or config.parent)
    section = settings.environment if settings else EnvironmentConfig().beside(modules or Path())
    section = section.changed(kind=kind)
    some = tasks.read(settings.data.train)[:8] if settings and settings.data.train else ()
    if turns:
        from megatron_stppo.weights.sharding.hf_load import load_tokenizer

        model = None
        if settings:
            model = settings, load_tokenizer(settings.model.path, settings.model.template_arguments)
        played = play(section, some, turns, typer.echo, model)
    else:
        played = check(section, some, action or ())
    if played.problems:
        raise ConfigError("\nmegatron-stppo: ".join(played.problems))
    if turns:
        return
    ends = ", ".join(f"{count} {name}" for name, count in sorted(played.outcomes.items())) or "none ended"
    unseen = "" if "ok" in played.outcomes else "; none was ok: give right actions with --action"
    typer.echo(f"no problem in {played.episodes} episodes, {played.turns} turns: {ends}{unseen}", err=True)


@commands.command("build-index", epilog=examples("megatron-stppo build-index corpus.jsonl index"))
def build_index(
    corpus: Annotated[Path, typer.Argument(help='.jsonl rows {"id", "contents"}; contents: "Title"\\ntext')],
    index: Annotated[Path, typer.Argument(help="new folder for the BM25 index")],
) -> None:
    """Index a corpus for environment.retrieval.index."""
    from megatron_stppo.base.files import check_absent
    from megatron_stppo.environments.retrieval import BM25Retriever, read_corpus

    check_absent("index", index)
    BM25Retriever.build(read_corpus(corpus), index)
    typer.echo(f"{len(BM25Retriever(index))} documents in {index}", err=True)


@commands.command(epilog=examples("megatron-stppo init my-project", "megatron-stppo init --agent my-agent"))
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False, help="new or empty folder")],
    agent: Annotated[
        bool, typer.Option("--agent", help="an agent with tools, which calls its model over HTTP")
    ] = False,
) -> None:
    """Write a new project: configuration, environment, data, tests and a model that trains on a CPU."""
    names = write_project(folder, AGENT if agent else TEMPLATE)
    typer.echo(f"wrote {', '.join(names)} to {folder}; next:\n")
    typer.echo(f"    cd {folder}\n    python make_model.py\n    pytest")
    typer.echo("    megatron-stppo train config.yaml\n\nREADME.md says what to change first.")


def write_project(folder: Path, template: Path = TEMPLATE) -> list[str]:
    """Copy the template's files into `folder`, which is created; return their names, sorted.

    Raises ConfigError if the folder holds anything, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"FOLDER={folder}: is not an empty folder; name a new one")
    files = [path for path in (MAKE_MODEL, *template.iterdir()) if path.is_file()]  # not __pycache__
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            (folder / path.name).write_bytes(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"FOLDER={folder}: {error.strerror}; name a folder that can be written") from None
    return sorted({path.name for path in files})
