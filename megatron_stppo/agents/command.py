"""Run an agent function as a program: `python -m megatron_stppo.agents.command MODULE:FUNCTION`.

It is for `environment.command`, in a Python environment that has the agent's packages, which need other
versions of their dependencies than tools/lock-cpu.txt has. So of megatron_stppo it imports only base/types.py
and environments/base.py:

    environment:
      kind: agent
      command: [.venv-agents/bin/python, -m, megatron_stppo.agents.command, "my_agent:agent"]

The function gets the same fields as with `environment.agent`, read from the standard input (the task) and
from environment variables, and the last line of the output is what it returns. If it raises an exception, the
exit status is 1.
"""

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence

from megatron_stppo.base.types import Message, Task
from megatron_stppo.environments.base import AgentEpisode


def episode_of(variables: Mapping[str, str], given: str) -> AgentEpisode:
    """Return the episode that the variables and the input of a command describe.

    given: the task as JSON. Example: in a command, episode_of(os.environ, sys.stdin.read()). Raises KeyError
    if one of the four variables is missing.
    """
    task = json.loads(given)
    prompt = tuple(map(Message.of, task["prompt"]))
    return AgentEpisode(
        task=Task(**task | {"prompt": prompt, "targets": tuple(task["targets"])}),
        base_url=variables["OPENAI_BASE_URL"],
        api_key=variables["OPENAI_API_KEY"],
        model=variables["MEGATRON_STPPO_MODEL"],
        seed=int(variables["MEGATRON_STPPO_SEED"]),
    )


def main(arguments: Sequence[str]) -> None:
    """Play the episode with the agent MODULE:FUNCTION, and print its result as JSON on the last line."""
    if len(arguments) != 1 or ":" not in arguments[0]:
        sys.exit("give one argument, MODULE:FUNCTION")
    module, _, name = arguments[0].partition(":")
    agent = getattr(importlib.import_module(module), name)
    result = asyncio.run(agent(episode_of(os.environ, sys.stdin.read())))
    print(f"\n{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
