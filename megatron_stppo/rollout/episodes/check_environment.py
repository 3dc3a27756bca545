"""Test an environment: play scripted episodes without a model, and report what is wrong.

The episodes run as in a rollout (environment_host.py): environments/contract.py checks every return value,
`environment.deadline` limits every call, and a call that does not await blocks all episodes.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_stppo.base.errors import ToolsStayAway
from megatron_stppo.base.printing import printable
from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import Config, ConfigError, EnvironmentConfig
from megatron_stppo.data.text.plain_text import decode_plain, encode_plain
from megatron_stppo.environments import choose, contract
from megatron_stppo.environments.base import Environment, StepResult
from megatron_stppo.rollout.episodes import episode
from megatron_stppo.rollout.episodes.environment_host import Answer, EnvironmentHost
from megatron_stppo.rollout.episodes.failures import FailureLines
from megatron_stppo.rollout.vllm.generation import Finished, Reason, RolloutError

TICK = 0.01  # seconds
STALL = 0.5  # seconds without an await after which a call is reported
TASK = Task("check-environment", (Message("user", "What is the answer?"),), ("42",), "train", 0)
OTHERS = itertools.repeat("another episode's action")
Episode = tuple[Any, ...]  # what the environment returned, for comparison


@dataclass
class Found:
    """The result of the scripted episodes. Example: Found(["Guess.step(): returned None; .."], 3, 7)."""

    problems: list[str] = field(default_factory=list)
    episodes: int = 0
    turns: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)  # of the function `rewards`; NaN: a call failed
    solved: list[bool] = field(default_factory=list)  # of the same episodes: whether the outcome was ok

    def add(self, problem: str) -> None:
        line = " ".join(problem.split())
        if line not in self.problems:
            self.problems.append(line)


def check(section: EnvironmentConfig, tasks: Sequence[Task] = (), actions: Sequence[str] = ()) -> Found:
    """Play one episode for every action of `actions` (default: those of `script`), and return what was found.

    An episode repeats its action until the environment is done or has no turns left. The episodes use the
    given tasks in turn (default: one fixed task). A call that blocks for longer than a rollout waits, and
    tools that do not answer, end the test.
    """
    return _found(section, lambda player: _compare(player, tasks or (TASK,), actions))


def play(
    section: EnvironmentConfig,
    tasks: Sequence[Task],
    turns: Sequence[str],
    show: Callable[[str], None],
    model: tuple[Config, Any] | None = None,
) -> Found:
    """Play one episode of the first task with the given turns, show it, and return what is wrong.

    model: a configuration and its tokenizer; then the turns end as the model's do, and the tokens that the
    model reads are shown too.
    """
    task = tasks[0] if tasks else TASK
    shown = _Shown(task, turns, show, model)
    found = _found(section, lambda player: shown.played_by(player))
    if found.episodes:
        shown.end()
    return found


def rewards(section: EnvironmentConfig, episodes: Sequence[tuple[Task, str]]) -> Found:
    """Play one episode for each task and action, as `check` does, and return what was found, with rewards."""

    def play(player: _Player) -> None:
        for task, action in episodes:
            played = player.play(task, itertools.repeat(action))
            results = [result for result in played or () if isinstance(result, StepResult)]
            reward = math.fsum(result.reward for result in results)
            player.found.rewards.append(reward if played is not None else math.nan)
            player.found.solved.append(any(result.outcome == "ok" for result in results))

    return _found(section, play)


def _found(section: EnvironmentConfig, play: Callable[[_Player], None]) -> Found:
    """Return what a function finds that plays episodes."""
    found = Found()
    try:
        choose.check(section)
        player = _Player(section, choose.factory(section), found)
    except ConfigError as error:
        found.add(str(error))
        return found
    with EnvironmentHost(player.make, concurrency=2, deadline=section.deadline, lines=player) as player.host:
        try:
            play(player)
        except (RolloutError, ToolsStayAway) as error:
            found.add(f"{player.where}: {error}")
    return found


def script(task: Task, stops: Sequence[str]) -> list[str]:
    """Return what a policy may write: nothing, prose, the answer, a search, special tokens, long text."""
    right = task.targets[0]
    endings = [f"a guess{stop}" for stop in stops]
    tags = [f"<answer>{right}</answer>", f"<search>{right}</search>", "<answer>unclosed"]
    return ["", "I do not know.", right, *tags, *endings, "<|im_end|>\x00\u202e", "word " * 2_000]


def _compare(player: _Player, tasks: Sequence[Task], actions: Sequence[str]) -> None:
    """Play every action alone, and again beside another episode."""
    player.play(tasks[0], itertools.repeat("hello"))
    for number in range(len(actions) or len(script(tasks[0], player.stops))):
        task = tasks[number % len(tasks)]
        action = (actions or script(task, player.stops))[number]
        alone = player.play(task, itertools.repeat(action))
        beside = player.play(task, itertools.repeat(action), lambda: player.play(tasks[-1], OTHERS))
        if alone is not None and beside is not None and repr(alone) != repr(beside):  # NaN equals nothing
            player.found.add(
                f"{player.name}: the same task, seed and actions gave a different result while a second "
                "episode was running; keep all state in the object, and draw random numbers from `seed`"
            )


class _Player(FailureLines):
    """Plays episodes, one call at a time, and records what is wrong instead of logging it."""

    host: EnvironmentHost

    def __init__(self, section: EnvironmentConfig, make: Callable[[], Environment], found: Found) -> None:
        super().__init__(logging.getLogger(__name__))
        self.found, self._section, self._make = found, section, make
        self.name = self.where = f"environment.kind={section.kind}"
        self.stops: tuple[str, ...] = ()
        self.answered: Callable[[Answer], object] = lambda answer: None  # called for every usable answer
        self._first: Environment | None = None
        self._failed = False

    def make(self) -> Environment:
        self.where = f"environment.kind={self._section.kind}: making an episode's environment"
        environment = self._make()
        if environment is self._first:
            self.found.add(
                f"environment.kind={self._section.kind}: the factory's function returned the same object "
                "twice; return a new one for every episode"
            )
        self._first = environment if self._first is None else self._first
        self.name = type(environment).__name__
        self.where = f"{self.name}.reset()"
        return environment

    def log(self, what: str, error: BaseException, detail: str) -> None:
        """Record a failed call. The host calls this in its own thread, before it passes the answer on."""
        self._failed = True
        if isinstance(error, contract.WrongValue | contract.NotAnEnvironment):
            self.found.add(str(error))
        elif isinstance(error, TimeoutError):
            self.found.add(f"{self.where}: {detail} (environment.deadline); answer sooner")
        else:
            self.found.add(f"{self.where}: raised {detail}; the episode ends as an error")

    def play(
        self, task: Task, actions: Iterable[str], after_reset: Callable[[], object] | None = None
    ) -> Episode | None:
        """Play until the environment is done or there are no more actions. Return the results of reset and
        steps, or None if a call failed."""
        index, self.found.episodes = self.found.episodes, self.found.episodes + 1
        answer = self._answer("reset", lambda: self.host.reset(index, task, 7))
        played: list[object] = [answer and (answer.messages, answer.stop_strings)]
        self.stops = answer.stop_strings if answer else self.stops
        if after_reset is not None:
            after_reset()
        most = self._section.max_turns + 1
        for turn, action in enumerate(actions if answer else ()):
            if turn == most:
                self.found.add(
                    f"{self.name}.step(): not done after {most} turns (environment.max_turns="
                    f"{self._section.max_turns} plus one for the answer); return done=True with an outcome "
                    "by then"
                )
                break
            answer = self._answer("step", partial(self.host.step, index, action))
            played.append(answer and answer.result)
            if answer is None or answer.result is None or answer.result.done:
                break
        self.where = f"{self.name}.close()"
        self._wait(self.host.close(index).done)
        return None if None in played else tuple(played)

    def _answer(self, name: str, call: Callable[[], None]) -> Answer | None:
        """Return the answer to a call, or None if it failed."""
        self.where, self._failed = f"{self.name}.{name}()", False
        call()
        answer: Answer = self._wait(lambda: self.host.take(0))[0]
        if answer.misuse:
            self.found.add(answer.misuse)
        if self._failed or answer.misuse:
            return None
        if answer.result is not None:
            self._look(answer.result.metrics, answer.result.outcome)
        self.answered(answer)
        return answer

    def _wait(self, take: Callable[[], Any]) -> Any:
        """Return what `take` returns when it is true, and report a call that blocks the event loop."""
        blocked, where = 0.0, ""
        while not (taken := take()):
            blocked, where = max((blocked, where), self.host.lag())
            time.sleep(TICK)
        if blocked > STALL:
            self.found.add(
                f"{self.where}: blocked the event loop for {blocked:.1f} s{where}, and with it all other "
                "episodes; await, or run what blocks in asyncio.to_thread"
            )
        return taken

    def _look(self, metrics: Any, outcome: str | None) -> None:
        self.found.turns += 1
        if left_out := [name for name, value in metrics.items() if value is None]:
            self.found.add(
                f"{self.where}: metrics that are left out: {', '.join(left_out)}; {contract.METRIC_RULE}"
            )
        if outcome is not None:
            self.found.outcomes[outcome] += 1


class _Shown:
    """An episode of given turns, which is shown while it is played."""

    def __init__(
        self, task: Task, turns: Sequence[str], show: Callable[[str], None], model: tuple[Config, Any] | None
    ) -> None:
        self._task, self._left, self._show, self._reward = task, list(turns), show, 0.0
        self._last: StepResult | None = None
        self._read: episode.Episode | None = None  # what the model reads
        if model is not None:
            config, tokenizer = model
            limits, ends = episode.Limits.of(config), (tokenizer.eos_token_id,)
            self._read = episode.Episode(task, 0, limits, tokenizer, ends)

    def played_by(self, player: _Player) -> None:
        player.answered = self._answered
        player.play(self._task, self._turns(player))

    def end(self) -> None:
        """Show the end of the episode, and what the model has read."""
        ended = self._read if self._over() else self._last
        done = ended is not None and ended.outcome is not None
        how = f"{ended.outcome}, detail {ended.detail!r}" if ended is not None and done else "not done"
        unplayed = f"; turns that were not played: {len(self._left)}" if self._left else ""
        self._show(f"end: {how}, reward {self._reward:g} in all{unplayed}")
        if self._read is None:
            self._show("give a CONFIG.yaml to see the text that its model.path would read")
        else:
            ids = self._read.context
            self._show(f"what the model reads and writes, {len(ids)} tokens:")
            self._show(printable(decode_plain(self._read.tokenizer, ids)))

    def _turns(self, player: _Player) -> Iterator[str]:
        while self._left and not self._over():
            written = self._left.pop(0)
            text = _until_stop(written, player.stops)
            if self._read is not None:
                text = _add_turn(self._read, text, player.stops)
            self._show(f"turn: {text!r}{f', cut from {written!r}' if text != written else ''}")
            if not self._over():
                yield text

    def _over(self) -> bool:
        """Return whether the program ends the episode: its prompt is too long, or its context is full."""
        return self._read is not None and self._read.outcome is not None

    def _answered(self, answer: Answer) -> None:
        result = self._last = answer.result
        if result is None:
            for message in answer.messages:
                self._show(f"{message.role}: {message.content!r}")
            if self._read is not None:
                self._read.start(answer.messages, answer.stop_strings)
            return
        self._reward += result.reward
        numbers = {"reward": result.reward, "valid": result.valid, "tool_calls": result.tool_calls}
        shown = ", ".join(f"{name} {value}" for name, value in {**numbers, **result.metrics}.items())
        self._show(f"observation: {result.observation!r} ({shown})")
        if self._read is not None:
            self._read.answer(result)


def _until_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text up to its first stop string, at which the engine ends a turn."""
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


def _add_turn(read: episode.Episode, text: str, stops: Sequence[str]) -> str:
    """Add a turn as the model would write it, and return its text for the environment."""
    ids, most = encode_plain(read.tokenizer, text), read.max_tokens
    stopped = text.endswith(tuple(stops)) if stops else False
    ids = ids if stopped else [*ids, read.tokenizer.eos_token_id]
    reason: Reason = "length" if len(ids) > most else "stop" if stopped else "end"
    ids = ids[:most]
    finished = Finished("", tuple(ids), (0.0,) * len(ids), reason, ((0, len(ids)),))
    read.add_turn(finished)
    return read.completion(finished).text
