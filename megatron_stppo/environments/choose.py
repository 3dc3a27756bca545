"""The environment that a run's configuration names: the search environment, or one of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments import search
from megatron_stppo.environments.base import Environment


def factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """What makes one environment per episode. Raises ConfigError for what cannot be imported or used.

    Example: kind "guess:factory" calls factory(config) of the module guess, as "search" calls search.factory.
    """
    if config.kind == "search":
        return search.factory(config)
    module, _, name = config.kind.partition(":")
    try:
        own = getattr(importlib.import_module(module), name or "factory")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"environment.kind={config.kind}: {error}; give search, or MODULE:FACTORY, found on PYTHONPATH"
        ) from None
    make: Callable[[], Environment] = own(config)
    return make
