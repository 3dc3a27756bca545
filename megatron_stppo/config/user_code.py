"""Code of the user that a configuration names as MODULE:NAME.

A configuration is data, but such a field names code that will be run. Only modules whose file lies in the
folder of the configuration file or in a folder of PYTHONPATH are allowed, because the person who starts the
run chooses both. The standard library, installed packages and the current folder are not allowed.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megatron_stppo.base.errors import ConfigError

FOUND = "in the folder of the configuration file (or --modules) or on PYTHONPATH"
REMEDY = f"give MODULE:FUNCTION, {FOUND}"


def function(where: str, text: str, modules: Path | None, default: str = "") -> Any:
    """Import and return what the text names. Arguments and errors as of `named`."""
    module, name = named(where, text, modules, default)
    with one_line(where, REMEDY):
        return getattr(importlib.import_module(module), name)


@contextmanager
def one_line(where: str, remedy: str, *passed: type[Exception]) -> Iterator[None]:
    """Turn what the user's code raises into a ConfigError of one line. passed: errors that are passed on."""
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        if isinstance(error, (ConfigError, *passed)):
            raise
        raise ConfigError(f"{where}: {_last_line(error)}{type(error).__name__}: {error}; {remedy}") from None


def _last_line(error: Exception) -> str:
    """Return the file and line that raised the error. Example: "guess.py line 12: "."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    own = [f for f in frames if "importlib" not in f.filename and not f.filename.startswith(package)]
    return f"{Path(own[-1].filename).name} line {own[-1].lineno}: " if own else ""


def named(
    where: str, text: str, modules: Path | None, default: str = "", remedy: str = REMEDY
) -> tuple[str, str]:
    """Return (module, name) of the text of a field, without importing the module.

    Afterwards Python finds the modules of the configuration's folder, after all others.
    Raises ConfigError unless the module's file lies in an allowed folder, and is the one that would be
    imported: another folder of sys.path, such as the current folder, may have a module of the same name.
    where: the field and its value, for the error. modules: the folder of the configuration file. default: the
    name if the text has none. Example: "guess" with the default "factory" gives ("guess", "factory").
    """
    module, _, name = text.partition(":")
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where}: {module!r} is not a module name; {remedy}")
    for folder in _allowed(modules):
        path = Path(folder, *parts)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                imported = _imported(parts)
                if imported is None or not file.samefile(imported):
                    other = imported or "no file"
                    raise ConfigError(f"{where}: Python imports {other} instead of {file}; rename the module")
                return module, name or default
    raise ConfigError(f"{where}: no allowed folder has this module; {remedy}")


def _allowed(modules: Path | None) -> list[str]:
    """Return the folders whose modules may be named, after adding that of the configuration to sys.path."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if modules is None:
        return folders
    beside = str(modules.resolve())
    if beside not in sys.path:
        sys.path.append(beside)  # at the end, so that it replaces no other module
    return [*folders, beside]


def _imported(parts: Sequence[str]) -> str | None:
    """Return the file that importing a module executes, or has executed, without importing it."""
    loaded = sys.modules.get(".".join(parts))
    if loaded is not None:
        return getattr(loaded, "__file__", None)
    spec = PathFinder.find_spec(parts[0])
    for end in range(2, len(parts) + 1):
        if spec is not None:
            spec = PathFinder.find_spec(".".join(parts[:end]), spec.submodule_search_locations)
    return spec.origin if spec is not None else None
