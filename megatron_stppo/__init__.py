"""ST-PPO for very large multi-turn LLM agents, on megatron-core and vLLM (arXiv 2511.20718).

This is the Python interface; docs/python.md describes it. Its names are imported when they are first used, so
that `import megatron_stppo` imports neither torch nor megatron nor vLLM.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_stppo import ops as ops
    from megatron_stppo.base.types import Task
    from megatron_stppo.commands.python import evaluate, load_config, train
    from megatron_stppo.environments.base import Environment as Environment
    from megatron_stppo.environments.base import StepResult as StepResult
    from megatron_stppo.observe.run_tables import read_run

__version__ = "0.1.0"
__all__ = ["Environment", "StepResult", "Task", "evaluate", "load_config", "ops", "read_run", "train"]
_MODULE = {
    "Environment": "environments.base",
    "StepResult": "environments.base",
    "Task": "base.types",
    "evaluate": "commands.python",
    "load_config": "commands.python",
    "read_run": "observe.run_tables",
    "train": "commands.python",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name at its first use (PEP 562)."""
    if name == "ops":
        return importlib.import_module(f"{__name__}.ops")
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
