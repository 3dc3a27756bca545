"""Arguments that several commands have, and the form of a help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.field=value]...", help="values that override the file", show_default=False
    ),
]
# the folder of the file, when the Python interface gives its configuration in another folder
Modules = Annotated[Path | None, typer.Option(hidden=True)]


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
