"""Write docs/configuration.md from the fields of config/, and docs/commands.md from the commands' help.

    python tools/write_reference.py [--check]

With --check, writes nothing, and exits with 1 if a file differs from what would be written.
"""

from __future__ import annotations

import argparse
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.main import get_command
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))  # also when it is run as a file

from megatron_stppo.__main__ import app
from megatron_stppo.config import AlgorithmConfig, Config

DOCS = Path(__file__).parents[1] / "docs"
CONFIGURATION = """# Configuration

A run is one YAML file with the sections below. On the command line, `section.field=value` overrides the file:
`megatron-stppo train config.yaml run.seed=1 update.actor.lr=2e-6`. The resolved file, with every field, is
saved as `config.yaml` in the run's folder.

`python tools/write_reference.py` writes this page from `megatron_stppo/config/`; a test checks it.
"""
ALGORITHM = "[algorithms.md](algorithms.md#settings) lists the fields, with formulas and sources.\n"
COMMANDS = """# Commands

`python -m megatron_stppo` is the same program. CONFIG.yaml is a [configuration](configuration.md), RUN_DIR
the folder of a run; `section.field=value` overrides a field of either. Commands with an environment have
`--modules FOLDER`, for the modules that fields name. `train`, `replay`, `rollout`, `evaluate`, `cold-start`,
`serve`, `convert`, `verify`, `check-layouts`, `audit` and `audit-tokens` run as one process,
or as one per device under torchrun or srun.
[cluster.md](cluster.md#exit-codes) has the exit codes.

`python tools/write_reference.py` writes this page from the commands' `--help`.
"""
WIDTH = {"COLUMNS": "100"}
# What the beginning of the page says of every command, and then headings with nothing below them.
REPEATED = [
    r"^ +(CONFIG\.yaml|RUN_DIR) <path> +.*\[required\]\n",
    r"^ +\[section\.field=value\]\.\.\. <list\[str\]>\n +values that override the file\n",
    r"^ +--modules <path> .*\n( {18,}.*\n)*",
    r"^ +(GRID\.yaml|RUN_DIR\.\.\.) <.*\[required\]\n",
    r"^ +--help +Show this message and exit\.\n",
    r"^(Arguments|Options):\n\n?(?=\n|\Z|[A-Z]|  Examples)",
]
SYMBOLS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def commands() -> str:
    """Return docs/commands.md: the help of every command, at most 100 columns wide below its usage."""
    root: Any = get_command(app)
    parts = [COMMANDS]
    for name, command in root.commands.items():
        nested = getattr(command, "commands", {})
        for path in [(name, inner) for inner in nested] or [(name,)]:
            shown = CliRunner().invoke(app, [*path, "--help"], env=WIDTH, prog_name="megatron-stppo").output
            for repeated in REPEATED:
                shown = re.sub(repeated, "", shown, flags=re.MULTILINE)
            usage, _, rest = shown.strip().partition("\n\n")
            usage = " ".join(usage.removeprefix("Usage:").replace("[OPTIONS]", "").split())
            lines = [usage, "", *rest.splitlines()]
            text = "\n".join(f"    {line}".rstrip() for line in lines)
            parts.append(f"## {' '.join(path)}\n\n{text}\n")
    return "\n".join(parts)


def configuration() -> str:
    """Return docs/configuration.md."""
    parts: list[str] = [CONFIGURATION]
    shown: dict[str, type[BaseModel]] = {}
    for name, model in sections(Config, ""):
        about = " ".join((model.__doc__ or "").split())
        fields = model.model_fields.keys()
        first, base = next(
            (item for item in shown.items() if item[1].model_fields.keys() <= fields), ("", None)
        )
        shown[name] = model
        rows = ALGORITHM if model is AlgorithmConfig else table(model, base)
        if base is not None:
            rows = f"The fields of `{first}`, with other defaults: {other_defaults(model, base)}.\n\n{rows}"
        parts.append(f"## {name}\n\n" + (f"{about}\n\n" if about else "") + rows)
    parts.append(f"## megatron\n\n{sentence(Config.model_fields['megatron'].description)}\n")
    return "\n".join(parts)


def sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every section and the sections in it. Example: ("update.actor", ActorOptimizerConfig)."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield f"{prefix}{name}", field.annotation
            yield from sections(field.annotation, f"{prefix}{name}.")


def table(model: type[BaseModel], base: type[BaseModel] | None = None) -> str:
    """Return the table of the fields that `base` does not have."""
    rows = ["| field | values | default | meaning |", "|---|---|---|---|"]
    known = () if base is None else base.model_fields
    for name, field in model.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        if name not in known and not nested:
            cells = (f"`{name}`", values(field), default(field), sentence(field.description))
            rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def other_defaults(model: type[BaseModel], base: type[BaseModel]) -> str:
    """Return the defaults that differ from those of a section with the same fields. Example: "`lr` `0.1`"."""
    fields = base.model_fields
    own = {name: default(field) for name, field in model.model_fields.items()}
    return ", ".join(
        f"`{name}` {value}"
        for name, value in own.items()
        if name in fields and value != default(fields[name])
    )


def values(field: FieldInfo) -> str:
    """Return the type and the bounds, without the null of a field whose default it is. Example: "int ≥ 1"."""
    kinds = [kind for kind in alternatives(field.annotation) if kind is not type(None)]
    return ", ".join(one(kind) for kind in kinds) + bounds(field.metadata)


def bounds(metadata: Sequence[Any]) -> str:
    """Return the bounds of a number. Example: " ≥ 0, < 1"."""
    return ",".join(f" {SYMBOLS[n]} {getattr(m, n)}" for m in metadata for n in SYMBOLS if hasattr(m, n))


def alternatives(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def one(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Annotated:
        return one(kind.__origin__) + bounds(getattr(kind.__metadata__[0], "metadata", ()))
    arguments = [argument for argument in typing.get_args(kind) if argument is not ...]
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if typing.get_origin(kind) is dict:
        return "{name: value}"
    if arguments:
        return "[" + ", ".join(one(argument) for argument in arguments) + "]"
    return {"bool": "true, false", "Path": "path", "str": "text"}.get(kind.__name__, kind.__name__)


def default(field: FieldInfo) -> str:
    """Return the default as YAML has it, or "required"."""
    if field.default is PydanticUndefined:
        return "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)}`"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    return "`null`" if field.default is None else f"`{field.default}`"


def sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check, stale = parser.parse_args(argv).check, []
    for name, text in (("configuration.md", configuration()), ("commands.md", commands())):
        target = DOCS / name
        if check and not (target.exists() and target.read_text(encoding="utf-8") == text):
            stale.append(name)
        elif not check:
            target.write_text(text, encoding="utf-8")
    if stale:
        print(f"{', '.join(stale)}: not current; call python tools/write_reference.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
