"""What a forecast assumes: names, defaults and meanings as data, and how a user replaces them.

Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.messages import did_you_mean
from megatron_stppo.plan.simulation.workload import DrawnLengths, LogNormal, ToolTimes


@dataclass(frozen=True)
class Assumption:
    """One number. `most` is the largest value; all are above 0.

    Example: Assumption("tool_seconds", "s", "median of the calls of tools").
    """

    name: str
    unit: str
    meaning: str
    most: float = math.inf


LENGTHS = (
    Assumption("turns", "", "turns of an episode"),
    Assumption("prompt_tokens", "tokens", "of a prompt, median; one in 100 has rollout.max_prompt_tokens"),
    Assumption("turn_tokens", "tokens", "of a turn, median; one in 100 has rollout.max_turn_tokens"),
    Assumption("observation_tokens", "tokens", "of an observation"),
)
TOOLS = (
    Assumption("tool_seconds", "s", "for a call of a tool, median"),
    Assumption("tool_seconds_p99", "s", "or more for one in 100 calls of tools"),
)
MACHINE = (
    Assumption(
        "step_seconds", "s", "of an engine step beside memory and FLOP: launches, collectives, sampling"
    ),
    Assumption("memory_share", "", "of the memory's bandwidth, in engine steps", 1.0),
    Assumption("engine_share", "", "of the peak FLOP/s, in engine steps", 1.0),
    Assumption("training_share", "", "of the peak FLOP/s, in score and update", 1.0),
    Assumption("network_share", "", "of the links' bandwidth, when weights are sent", 1.0),
    Assumption(
        "switch_seconds", "s", "to put a colocated engine to sleep, wake it, and move the models' memory"
    ),
    Assumption("replica_memory", "", "of a replica's GPU memory for the engine", 0.99),
)
ALL = {one.name: one for one in (*LENGTHS, *TOOLS, *MACHINE)}


def read(config: Config, overrides: Iterable[str]) -> dict[str, float]:
    """Return all assumptions by name, with those of `overrides` ("NAME=VALUE") in place of the defaults.

    Raises ConfigError for an unknown name, or a value that is out of range.
    """
    found = defaults(config)
    for override in overrides:
        name, _, text = override.partition("=")
        if name not in found:
            hint = did_you_mean(name, found, "--assume {}=VALUE") or f"choose from {', '.join(found)}"
            raise ConfigError(f"--assume {override}: there is no assumption {name!r}; {hint}")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= ALL[name].most or math.isinf(value):
            most = "" if math.isinf(ALL[name].most) else f" and at most {ALL[name].most:g}"
            raise ConfigError(f"--assume {override}: {text!r} is not a number above 0{most}")
        found[name] = value
    if found["tool_seconds_p99"] < found["tool_seconds"]:
        raise ConfigError(
            f"--assume tool_seconds_p99={found['tool_seconds_p99']:g}: is below the median "
            f"tool_seconds={found['tool_seconds']:g}; give both"
        )
    return found


def defaults(config: Config) -> dict[str, float]:
    """Return the default of every assumption by name. Some depend on the limits of the configuration."""
    r, e = config.rollout, config.environment
    return {
        "turns": e.max_turns,
        "prompt_tokens": max(1.0, r.max_prompt_tokens / 4),
        "turn_tokens": max(1.0, r.max_turn_tokens / 2),
        "observation_tokens": e.max_observation_tokens,
        "tool_seconds": 1.0,
        "tool_seconds_p99": 10.0,
        "step_seconds": 0.005,
        "memory_share": 0.7,
        "engine_share": 0.5,
        "training_share": 0.35,
        "network_share": 0.5,
        "switch_seconds": 5.0,
        "replica_memory": 0.9,
    }


def lengths(config: Config, given: Mapping[str, float]) -> DrawnLengths:
    """Return the assumed lengths of episodes."""
    prompt, turn = config.rollout.max_prompt_tokens, config.rollout.max_turn_tokens
    return DrawnLengths(
        prompt=_up_to(given["prompt_tokens"], prompt),
        turns=LogNormal(given["turns"], given["turns"]),
        turn=_up_to(given["turn_tokens"], turn),
        observation=LogNormal(given["observation_tokens"], given["observation_tokens"]),
        context=config.max_context,
    )


def tools(config: Config, given: Mapping[str, float]) -> ToolTimes:
    """Return the assumed times of tools."""
    calls = LogNormal(given["tool_seconds"], given["tool_seconds_p99"], config.environment.deadline)
    return ToolTimes(calls, at_once=config.environment.concurrency)


def _up_to(median: float, most: float) -> LogNormal:
    """Return a distribution of which one in 100 reaches `most`, and none exceeds it."""
    return LogNormal(min(median, most), most, most)
