"""The command line. The arguments of the commands are in commands/.

Exit codes: 0 done, 2 bad usage or configuration, 85 checkpointed for requeue, 93 do not restart, anything
else a crash.
"""

import gc
import sys
from typing import Annotated, NoReturn

import typer

from megatron_stppo import __version__
from megatron_stppo.base.errors import Ending
from megatron_stppo.base.printing import drop_unwritable
from megatron_stppo.cluster.exits import (
    ENDS,
    PATIENCE,
    crash,
    end_within,
    has_process_groups,
    leave,
    report_to_torchrun,
    say,
)
from megatron_stppo.commands import check, convert, environments, plan, report, serve, train
from megatron_stppo.commands.open_run import command_group, examples

app = command_group(
    "ST-PPO for very large multi-turn LLM agents, on megatron-core and vLLM.",
    examples(
        "megatron-stppo init my-project            a new project that trains at once on a CPU",
        "megatron-stppo train config.yaml          one process",
        "torchrun --standalone --nproc-per-node 8 -m megatron_stppo train config.yaml",
        "megatron-stppo train config.yaml run.name=second update.actor.lr=1e-5",
    ),
)
# What these commands do is on the disk. Others print it, and fail if their output cannot be written.
_ON_DISK = ("train", "replay", "rollout", "evaluate", "cold-start", "serve")
_FILES = (train, serve, environments, plan, report, check)
for _file in _FILES:
    app.add_typer(_file.commands)
app.add_typer(convert.commands, name="convert")
for _commands in (*(file.commands for file in _FILES), convert.commands):
    for _command in _commands.registered_commands:
        # Without a short_help the list of commands cuts their first sentence where the line ends.
        _command.short_help = (_command.callback.__doc__ or "").strip()


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


def run() -> int:
    """Run the command line and return its exit code. An error that the user can fix becomes one line."""
    try:
        app(prog_name="megatron-stppo")  # the same under `python -m megatron_stppo`
    except SystemExit as end:  # so ends every command that does not fail
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception as error:
        if not isinstance(error, Ending):
            return crash(error, 1)
        report_to_torchrun(f"megatron-stppo: {error}", error.exit_code)
        say(error)
        return error.exit_code
    return 0


def main() -> NoReturn:
    """Run the command line and end the process."""
    drop_unwritable("stderr", *(("stdout",) if sys.argv[1:2] and sys.argv[1] in _ON_DISK else ()))
    code = run()
    end_within(code, ENDS.get(code, PATIENCE))
    if has_process_groups():
        leave(code)
    # Python's last garbage collection visits all objects of torch and vLLM, which takes seconds.
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    main()
