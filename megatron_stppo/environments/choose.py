"""The environment that a run's configuration names: the search environment, or one of the user's own.

A configuration is data, and here it names code. So what it may name is not in its hands: modules whose file
lies in a folder of PYTHONPATH, which whoever starts the run sets. Not the standard library, not what is
installed, not the current folder.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments import search
from megatron_stppo.environments.base import Environment

REMEDY = "give search, or MODULE:FACTORY, found on PYTHONPATH"


def factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """What makes one environment per episode. Raises ConfigError for what cannot be imported or used.

    Example: kind "guess:factory" calls factory(config) of the module guess, as "search" calls search.factory.
    """
    if config.kind == "search":
        return search.factory(config)
    name = config.kind.partition(":")[2]
    try:
        own = getattr(importlib.import_module(_module(config.kind)), name or "factory")
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        raise ConfigError(f"environment.kind={config.kind}: {error}; {REMEDY}") from None
    make: Callable[[], Environment] | None = own(config) if callable(own) else None
    if not callable(make):
        raise ConfigError(
            f"environment.kind={config.kind}: its factory must take the section and return a function "
            f"without arguments; {REMEDY}"
        )
    return make


def check(config: EnvironmentConfig) -> None:
    """What can be known before torch and megatron are set up, which a module of the user's may import.

    The search environment's retriever is reachable and not empty, or one's own module is there. Raises
    ConfigError.
    """
    if config.kind == "search":
        search.open_retriever(config.retrieval)
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
