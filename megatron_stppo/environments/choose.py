"""The environment named by a run's configuration: one of the package, or one that the user wrote.

A configuration is data, but this field names code that will be run. Only modules whose file lies in the
folder of the configuration file or in a folder of PYTHONPATH are allowed, because the person who starts the
run chooses both. The standard library, installed packages and the current folder are not allowed.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments import reasoning_gym, rewarded, search
from megatron_stppo.environments.base import Environment, ToolAway

AGENT = "agent"  # its environment needs the engine's process: agents/endpoint/opening.py
BUILT_IN: dict[str, Callable[[EnvironmentConfig], Callable[[], Environment]]] = {
    "search": search.factory,
    reasoning_gym.KIND: reasoning_gym.factory,
}
FOUND = "in the folder of the configuration file or on PYTHONPATH"
REMEDY = f"give {', '.join(BUILT_IN)}, {AGENT}, or MODULE:FACTORY, {FOUND}"
FUNCTION_REMEDY = f"give MODULE:FUNCTION, {FOUND}"


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
    make = BUILT_IN[config.kind](config) if config.kind in BUILT_IN else _own(config)
    if config.reward is None:
        return make
    where = f"environment.reward={config.reward}"
    module, name = _named(config, "reward", config.reward)
    with _one_line(where, FUNCTION_REMEDY):
        found = getattr(importlib.import_module(module), name)
    function = rewarded.check_signature(found, where)
    return lambda: rewarded.Rewarded(make(), function, where)


def _own(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return what the user's factory returns."""
    where = f"environment.kind={config.kind}"
    module, name = _named(config, "kind", config.kind)
    with _one_line(where, REMEDY):
        own = getattr(importlib.import_module(module), name)
        make: Callable[[], Environment] | None = own(config) if callable(own) else None
    if not callable(make):
        raise ConfigError(
            f"{where}: its factory must take the section and return a function without arguments; {REMEDY}"
        )
    return make


@contextmanager
def _one_line(where: str, remedy: str) -> Iterator[None]:
    """Turn what the user's code raises into a ConfigError of one line."""
    try:
        yield
    except (ConfigError, ToolAway):
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{where}: {_last_line(error)}{type(error).__name__}: {error}; {remedy}") from None


def _last_line(error: Exception) -> str:
    """Return the file and line that raised the error. Example: "guess.py line 12: "."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    return f"{Path(own[-1].filename).name} line {own[-1].lineno}: " if own else ""


def check(config: EnvironmentConfig, resume: bool = False) -> None:
    """Raise ConfigError for an environment that cannot work, before torch and megatron are set up.

    For the search environment, check that the retriever is reachable and not empty. With `resume` it need not
    be reachable yet, because the run waits for it. For reasoning_gym, check that the package is installed.
    For a user's module, check only that its file exists: the module may import torch, so it is not imported
    here.
    """
    if config.reward is not None:
        _named(config, "reward", config.reward)
    if config.kind == "search":
        with suppress(*((search.Unreachable,) if resume else ())):
            search.open_retriever(config)
    elif config.kind in BUILT_IN:
        BUILT_IN[config.kind](config)
    elif config.kind != AGENT:
        _named(config, "kind", config.kind)
    elif config.agent is not None:
        _named(config, "agent", config.agent)
    elif config.command is not None and shutil.which(config.command[0]) is None:
        raise ConfigError(
            f"environment.command={config.command[0]}: no such program; give its path, or set PATH"
        )


def agent(config: EnvironmentConfig) -> Any:
    """Import and return the object that environment.agent names. Raises ConfigError if it cannot be used."""
    assert config.agent is not None
    module, attribute = _named(config, "agent", config.agent)
    with _one_line(f"environment.agent={config.agent}", FUNCTION_REMEDY):
        return getattr(importlib.import_module(module), attribute)


def _named(config: EnvironmentConfig, field: str, text: str) -> tuple[str, str]:
    """Return (module, name) of the text of a field, without importing the module.

    Afterwards Python finds the modules of the configuration's folder, after all others.
    Raises ConfigError unless the module's file lies in an allowed folder, and is the one that would be
    imported: another folder of sys.path, such as the current folder, may have a module of the same name.
    Example: the kind "guess" gives ("guess", "factory").
    """
    where, remedy = f"environment.{field}={text}", REMEDY if field == "kind" else FUNCTION_REMEDY
    module, _, name = text.partition(":")
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where}: {module!r} is not a module name; {remedy}")
    for folder in _allowed(config):
        path = Path(folder, *parts)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                imported = _imported(parts)
                if imported is None or not file.samefile(imported):
                    other = imported or "no file"
                    raise ConfigError(f"{where}: Python imports {other} instead of {file}; rename the module")
                return module, name or ("factory" if field == "kind" else field)
    raise ConfigError(f"{where}: no allowed folder has this module; {remedy}")


def _allowed(config: EnvironmentConfig) -> list[str]:
    """Return the folders whose modules may be named, after adding that of the configuration to sys.path."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if config.modules is None:
        return folders
    beside = str(config.modules.resolve())
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
