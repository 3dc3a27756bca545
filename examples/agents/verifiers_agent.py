"""An agent for environments of the package verifiers (0.4). They play the episodes and compute the rewards.

PYTHONPATH=.:examples/agents megatron-stppo train CONFIG environment.kind=agent \
    'environment.command=[.venv-verifiers/bin/python,
    -m, megatron_stppo.agents.command, "verifiers_agent:agent"]'

A row of the data names the environment and the task in extra_info:
{"verifiers": {"env": {"taskset": {"id": "NAME"}, ..}, "task": 3}}. `env` is the section of the package's
configuration, and `task` is the position in the taskset. This program writes such rows:

    PYTHONPATH=. .venv-verifiers/bin/python examples/agents/verifiers_agent.py ENV_AS_JSON SPLIT FIRST SIZE \
        > train.jsonl
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf

from megatron_stppo.environments.base import AgentEpisode

NAME = "verifiers"


def open_environment(env: Mapping[str, Any]) -> Any:
    """Return the environment of a section `env`. The package's own errors name wrong fields."""
    section = dict(env)
    kind = vf.env_config_type(section.get("taskset", {}).get("id", ""), section.get("id", ""))
    return vf.load_environment(kind.model_validate(section))


async def agent(episode: AgentEpisode) -> dict[str, float]:
    """Play one task of the environment, and return its reward, its metrics and the individual rewards.

    The package reads the key from the variable OPENAI_API_KEY, which a command has. Raises RuntimeError if
    the episode failed, or if not exactly one of its agents is trained.
    """
    given = episode.task.extra[NAME]
    environment = open_environment(given["env"])
    (task,) = itertools.islice(environment.taskset, given["task"], given["task"] + 1)
    client = vf.EvalClientConfig(base_url=episode.base_url, api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        played = await environment.run_episode(task, vf.ModelContext(episode.model, client))
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    if errors or not played.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "not finished")
    traces = [trace for trace in played.traces if trace.agent is None or trace.agent.trainable]
    if len(traces) != 1:
        raise RuntimeError(f"{len(traces)} trained agents in an episode; one is possible")
    return _scored(traces[0])


def _scored(trace: Any) -> dict[str, float]:
    single = {name: given.value for name, given in trace.rewards.items() if given is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return single | metrics | {"reward": trace.reward}


def task_rows(env: Mapping[str, Any], split: str, first: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data file for `size` tasks of the environment, from position `first`."""
    taskset = open_environment(env).taskset
    for position, task in enumerate(itertools.islice(taskset, first, first + size), first):
        yield {
            "data_source": f"{NAME}/{env['taskset']['id']}",
            "prompt": [{"role": "user", "content": task.data.prompt_text or f"task {position}"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": ["scored by the environment"]}},
            "extra_info": {"split": split, "index": position, NAME: {"env": env, "task": position}},
        }


if __name__ == "__main__":
    section, split, first, size = sys.argv[1:]
    for row in task_rows(json.loads(section), split, int(first), int(size)):
        print(json.dumps(row))
