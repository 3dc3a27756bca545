"""The environment named by a run's configuration: the search environment, or one that the user wrote.

A configuration is data, but this field names code that will be run. Only modules whose file lies in a folder
of PYTHONPATH are allowed, because the person who starts the run sets PYTHONPATH. The standard library,
installed packages and the current folder are not allowed.
"""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments import search
from megatron_stppo.environments.base import Environment, ToolAway

REMEDY = "give search, or MODULE:FACTORY, found on PYTHONPATH (PYTHONPATH=. for the current folder)"


def factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return a function that makes one environment per episode.

    Raises ConfigError if the environment cannot be imported or used. A ToolAway that the user's factory
    raises is passed on.
    Example: kind "guess:factory" calls factory(config) of the module guess; "search" calls search.factory.
    """
    if config.kind == "search":
        return search.factory(config)
    name = config.kind.partition(":")[2]
    module = _module(config.kind)
    try:
        own = getattr(importlib.import_module(module), name or "factory")
        make: Callable[[], Environment] | None = own(config) if callable(own) else None
    except (ConfigError, ToolAway):
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"environment.kind={config.kind}: {_last_line(error)}{type(error).__name__}: {error}; {REMEDY}"
        ) from None
    if not callable(make):
        raise ConfigError(
            f"environment.kind={config.kind}: its factory must take the section and return a function "
            f"without arguments; {REMEDY}"
        )
    return make


def _last_line(error: Exception) -> str:
    """Return the file and line that raised the error. Example: "guess.py line 12: "."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    return f"{Path(own[-1].filename).name} line {own[-1].lineno}: " if own else ""


def check(config: EnvironmentConfig, resume: bool = False) -> None:
    """Raise ConfigError for an environment that cannot work, before torch and megatron are set up.

    For the search environment, check that the retriever is reachable and not empty. With `resume` it need not
    be reachable yet, because the run waits for it. For a user's module, check only that its file exists: the
    module may import torch, so it is not imported here.
    """
    if config.kind == "search":
        with suppress(*((search.Unreachable,) if resume else ())):
            search.open_retriever(config)
        return
    _module(config.kind)


def _module(kind: str) -> str:
    """Return the name of the module in `kind`, without importing it.

    Raises ConfigError unless its file lies in a folder of PYTHONPATH.
    """
    module = kind.partition(":")[0]
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"environment.kind={kind}: {module!r} is not a module name; {REMEDY}")
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        path = Path(folder, *parts)
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return module
    raise ConfigError(f"environment.kind={kind}: no folder of PYTHONPATH has this module; {REMEDY}")
