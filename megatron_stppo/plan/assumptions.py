"""What a forecast assumes: names, defaults and meanings as data, and how a user replaces them.

Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from megatron_stppo.base.printing import did_you_mean
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.plan.simulation.workload import DrawnLengths, LogNormal, ToolTimes


@dataclass(frozen=True)
class Assumption:
    """One number. `most` is the largest value; all are above 0.

    Example: Assumption("s for a call of a tool, median", lambda _: 1.0).
    """

    meaning: str  # follows the number, so it begins with the unit
    default: Callable[[Config], float]
    most: float = math.inf


ALL = {
    "turns": Assumption("turns of an episode", lambda c: c.environment.max_turns),
    "prompt_tokens": Assumption(
        "tokens of a prompt, median; one in 100 has rollout.max_prompt_tokens",
        lambda c: max(1.0, c.rollout.max_prompt_tokens / 4),
    ),
    "turn_tokens": Assumption(
        "tokens of a turn, median; one in 100 has rollout.max_turn_tokens",
        lambda c: max(1.0, c.rollout.max_turn_tokens / 2),
    ),
    "observation_tokens": Assumption(
        "tokens of an observation", lambda c: c.environment.max_observation_tokens
    ),
    "tool_seconds": Assumption("s for a call of a tool, median", lambda _: 1.0),
    "tool_seconds_p99": Assumption("s or more for one in 100 calls of tools", lambda _: 10.0),
    "step_seconds": Assumption(
        "s of an engine step beside memory and FLOP: launches, collectives, sampling", lambda _: 0.005
    ),
    "memory_share": Assumption("of the memory's bandwidth, in engine steps", lambda _: 0.7, 1.0),
    "engine_share": Assumption("of the peak FLOP/s, in engine steps", lambda _: 0.5, 1.0),
    "training_share": Assumption("of the peak FLOP/s, in score and update", lambda _: 0.35, 1.0),
    "network_share": Assumption("of the links' bandwidth, when weights are sent", lambda _: 0.5, 1.0),
    "switch_seconds": Assumption(
        "s to put a colocated engine to sleep, wake it, and move the models' memory", lambda _: 5.0
    ),
    "replica_memory": Assumption("of a replica's GPU memory for the engine", lambda _: 0.9, 0.99),
}
OF_LENGTHS = ("turns", "prompt_tokens", "turn_tokens", "observation_tokens")


def read(config: Config, overrides: Iterable[str]) -> dict[str, float]:
    """Return all assumptions by name, with those of `overrides` ("NAME=VALUE") in place of the defaults.

    Raises ConfigError for an unknown name, or a value that is out of range.
    """
    found = {name: one.default(config) for name, one in ALL.items()}
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
