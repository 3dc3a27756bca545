"""The environment that a run's configuration names: the search environment, or one of the user's own.

A configuration is data, and here it names code. So what it may name is not in its hands: modules whose file
lies in a folder of PYTHONPATH, which whoever starts the run sets. Not the standard library, not what is
installed, not the current folder.
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
    """What makes one environment per episode. Raises ConfigError for what cannot be imported or used, and
    ToolAway where a factory does.

    Example: kind "guess:factory" calls factory(config) of the module guess, as "search" calls search.factory.
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
    except Exception as error:  # code of the user's may raise anything
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
    """Where it was raised. Example: "guess.py line 12: "."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    return f"{Path(own[-1].filename).name} line {own[-1].lineno}: " if own else ""


def check(config: EnvironmentConfig, resume: bool = False) -> None:
    """What can be known before torch and megatron are set up, which a module of the user's may import.

    The search environment's retriever is reachable and not empty, or one's own module is there. With `resume`
    it need not be reachable yet: the run waits for it. Raises ConfigError.
    """
    if config.kind == "search":
        with suppress(*((search.Unreachable,) if resume else ())):
            search.open_retriever(config)
        return
    _module(config.kind)


def _module(kind: str) -> str:
    """The module that `kind` names, found without importing anything. Raises ConfigError unless its file lies
    in a folder of PYTHONPATH."""
    module = kind.partition(":")[0]
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"environment.kind={kind}: {module!r} is no module's name; {REMEDY}")
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        path = Path(folder, *parts)
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return module
    raise ConfigError(f"environment.kind={kind}: no such module in a folder of PYTHONPATH; {REMEDY}")
