"""The environment: the multi-turn tasks of the Berkeley Function-Calling Leaderboard.

Tasks, simulated APIs and ground truth are those of the package bfcl-eval; make_data.py writes the rows of
a data file. The policy reads the functions and a user's message, and writes calls in Hermes's
form, <tool_call>{"name": .., "arguments": {..}}</tool_call>. A reply without a call ends the user's turn.

The turn passes as in the benchmark's checker (bfcl_eval 2026.3.23, multi_turn_checker): the public attributes
of all objects equal those after the ground truth, and the results of this turn's ground truth are among the
results so far. Differences from the benchmark: an episode ends at the first turn that does not pass, because
its score is then 0; a function can be called only after the policy has read about it; arguments have the
declared types and limits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bfcl_tools import SimulatedApis, Simulation, ToolCall, load, read_calls

from megatron_stppo.base.types import Message, Outcome, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments.answers import MAX_ACTION
from megatron_stppo.environments.base import StepResult

KIND, WRITER = "bfcl", "examples/bfcl/make_data.py"
MAX_STEPS = 20  # replies with calls in one turn of the user, as in the benchmark


class BfclEnvironment:
    """One episode: all turns of a scenario's user, until one does not pass."""

    stop_strings: tuple[str, ...] = ()  # a reply may contain several calls, and ends as the model ends it

    def __init__(self, apis: SimulatedApis, max_turns: int, turn_rewards: bool) -> None:
        """turn_rewards: reward each turn of the user that passes, instead of the last one alone."""
        self._apis, self._max_turns, self._turn_rewards = apis, max_turns, turn_rewards

    async def reset(self, task: Task, seed: int) -> list[Message]:
        """Return the task's prompt. The seed is unused: the scenario has that of the simulated APIs.

        Raises ConfigError for a row that WRITER has not written.
        """
        scenario = task.extra.get(KIND)
        if not isinstance(scenario, dict) or not {"classes", "state", "turns"} <= scenario.keys():
            raise ConfigError(
                f"{task.data_source} row {task.index}: extra_info.{KIND} is missing; write the data with "
                f"{WRITER}"
            )
        classes, long_context = scenario["classes"], scenario["long_context"]
        self._played = Simulation(self._apis, classes, scenario["state"], long_context)
        self._truth = Simulation(self._apis, classes, scenario["state"], long_context)
        self._turns: list[dict[str, Any]] = scenario["turns"]
        self._functions = {name for each in classes for name in self._apis.functions[each]}
        self._functions -= set(scenario["hidden"])
        self._results = Counter[str]()  # of the whole episode
        self._turn = self._replies = self._calls = self._steps = self._passed = 0
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        self._replies += 1
        calls = read_calls(action) if len(action) <= MAX_ACTION else [f"over {MAX_ACTION} characters"]
        return self._answer_calls(calls) if calls else self._end_turn()

    async def close(self) -> None: ...

    def _answer_calls(self, calls: Sequence[ToolCall | str]) -> StepResult:
        results = [self._result(call) for call in calls]
        valid = all(isinstance(call, ToolCall) for call in calls)
        self._steps += 1
        self._calls += len(calls)
        if self._steps > MAX_STEPS:
            return self._end("truncated", f"over {MAX_STEPS} steps", valid, len(calls))
        if self._replies >= self._max_turns:
            return self._end("truncated", f"environment.max_turns={self._max_turns}", valid, len(calls))
        shown = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
        return StepResult(shown, 0.0, done=False, valid=valid, tool_calls=len(calls))

    def _result(self, call: ToolCall | str) -> str:
        if isinstance(call, str):
            return json.dumps({"error": call})
        if call.name not in self._functions:
            return json.dumps({"error": f"no such function: {call.name[:80]!a}"})
        result = self._played.call(call.name, call.arguments)
        self._results[result] += 1
        return result

    def _end_turn(self) -> StepResult:
        """Check the user's turn, and go on to the next one."""
        truth = self._turns[self._turn]["calls"]
        problem = self._problem(truth)
        if problem:
            return self._end("wrong", problem)
        share = 1 / sum(bool(turn["calls"]) for turn in self._turns) if truth else 0.0
        self._passed += 1
        if self._passed == len(self._turns):
            return self._end("ok", "", reward=share if self._turn_rewards else 1.0)
        if self._replies >= self._max_turns:
            return self._end("truncated", f"environment.max_turns={self._max_turns}")
        self._turn += 1
        self._steps = self._calls = 0
        following = self._turns[self._turn]
        self._functions |= set(following["added"])
        return StepResult(following["user"], share if self._turn_rewards else 0.0, done=False, valid=True)

    def _problem(self, truth: Sequence[Mapping[str, Any]]) -> str:
        """Make the calls of this turn's ground truth. Return why the turn does not pass, or ""."""
        expected = Counter(self._truth.call(call["name"], call["arguments"]) for call in truth)
        if not truth:  # the request cannot be done yet; what the calls changed is compared in the next turn
            return ""
        if self._calls == 0:
            return "no call"
        if different := self._played.differing(self._truth):
            return f"another state of {', '.join(different)}"
        return "" if expected <= self._results else "results of the ground truth are missing"

    def _end(
        self, outcome: Outcome, why: str, valid: bool = True, calls: int = 0, reward: float = 0.0
    ) -> StepResult:
        detail = f"turn {self._turn + 1} of {len(self._turns)}{': ' if why else ''}{why}"
        metrics = {"turns_passed": self._passed, "turns_passed_share": self._passed / len(self._turns)}
        return StepResult("", reward, True, valid, calls, outcome, detail, metrics=metrics)


def factory(section: EnvironmentConfig, turn_rewards: bool = False) -> Callable[[], BfclEnvironment]:
    """Return a function that makes one environment per episode.

    Raises ConfigError if the package is not installed.
    """
    apis = load()
    return lambda: BfclEnvironment(apis, section.max_turns, turn_rewards)


def turn_rewards(section: EnvironmentConfig) -> Callable[[], BfclEnvironment]:
    return factory(section, turn_rewards=True)
