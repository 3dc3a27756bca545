"""The environment that a run's configuration names: the search environment, or one of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

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
    module, _, name = config.kind.partition(":")
    try:
        own = getattr(importlib.import_module(module), name or "factory")
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
    try:
        found = importlib.util.find_spec(config.kind.partition(":")[0])
    except (ImportError, ValueError) as error:
        raise ConfigError(f"environment.kind={config.kind}: {error}; {REMEDY}") from None
    if found is None:
        raise ConfigError(f"environment.kind={config.kind}: no such module; {REMEDY}")
