"""The environment named by a run's configuration: one of the package, or one that the user wrote."""

import importlib
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress

from megatron_stppo.base import interfaces
from megatron_stppo.config import ConfigError, EnvironmentConfig, user_code
from megatron_stppo.config.user_code import FOUND
from megatron_stppo.environments import rewarded, search
from megatron_stppo.environments.base import Environment, ToolAway

AGENT = "agent"  # its environment needs the engine's process: agents/endpoint/opening.py
REMEDY = f"give search, {AGENT}, or MODULE:FACTORY, {FOUND}"


def factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return a function that makes one environment per episode.

    Raises ConfigError if the environment, or the function that `environment.reward` names, cannot be imported
    or used. A ToolAway that the user's factory raises is passed on.
    Example: kind "guess:factory" calls factory(config) of the module guess; "search" calls search.factory.
    """
    if config.kind == AGENT:
        raise ConfigError(
            "environment.kind=agent: an agent needs a policy; play its episodes with `megatron-stppo rollout`"
        )
    make = search.factory(config) if config.kind == "search" else _own(config)
    if config.reward is None:
        return make
    where = f"environment.reward={config.reward}"
    function = rewarded.check_signature(user_code.function(where, config.reward, config.modules), where)
    return lambda: rewarded.Rewarded(make(), function, where)


def _own(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return what the user's factory returns."""
    where, (module, name) = f"environment.kind={config.kind}", _named(config)
    with user_code.one_line(where, REMEDY, ToolAway):
        own = getattr(importlib.import_module(module), name)
        make: Callable[[], Environment] | None = own(config) if callable(own) else None
    if not callable(make):
        raise ConfigError(
            f"{where}: its factory must take the section and return a function without arguments; {REMEDY}"
        )
    return make


def _named(config: EnvironmentConfig) -> tuple[str, str]:
    """Return the module and the name of the user's factory. Raises ConfigError, as `user_code.named`."""
    return user_code.named(f"environment.kind={config.kind}", config.kind, config.modules, "factory", REMEDY)


def check(config: EnvironmentConfig, resume: bool = False) -> None:
    """Raise ConfigError for an environment that cannot work, before torch and megatron are set up.

    For the search environment, check that the retriever is reachable and not empty. With `resume` it need not
    be reachable yet, because the run waits for it. For a user's module, check only that its file exists: the
    module may import torch, so it is not imported here.
    """
    if config.reward is not None:
        user_code.named(f"environment.reward={config.reward}", config.reward, config.modules, "reward")
    if config.kind == "search":
        with suppress(*((search.Unreachable,) if resume else ())):
            search.open_retriever(config)
    elif config.kind == AGENT:
        _check_agent(config)
    else:
        _named(config)


def _check_agent(config: EnvironmentConfig) -> None:
    listen_for_agents(config.agents_address).close()
    if config.agent is not None:
        user_code.named(f"environment.agent={config.agent}", config.agent, config.modules, "agent")
    elif config.command is not None and shutil.which(config.command[0]) is None:
        raise ConfigError(
            f"environment.command={config.command[0]}: no such program; give its path, or set PATH"
        )


def listen_for_agents(address: str) -> socket.socket:
    """Return a socket that listens at `environment.agents_address`. Raises ConfigError."""
    return interfaces.listen("environment.agents_address", address, "agents")
