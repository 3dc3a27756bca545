"""Multi-turn rollout in lock-step: every rank of an engine group runs the same engine steps.

Environments run on the group's first rank only. Between two engine steps this rank broadcasts the
environments' answers, and every rank advances its own copy of the episodes. The next turn of an episode
enters the engine at once, so tool calls and generation overlap (continuous batching). The prefix cache keeps
the history. With `overlap_tools=False` the rollout waits for all answers and processes them in order of
submission; a run is then bitwise reproducible, whatever the timing of the tools.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_stppo.config import ConfigError
from megatron_stppo.environments.base import Environment
from megatron_stppo.parallel.collectives import broadcast_bytes, decode, encode
from megatron_stppo.parallel.raise_together import by_rank, raise_together
from megatron_stppo.resilience.faults import ToolsStayAway
from megatron_stppo.rollout.environment_host import Answer, EnvironmentHost
from megatron_stppo.rollout.episode import Episode, Limits
from megatron_stppo.rollout.generation import EngineFailure, Finished, RolloutError
from megatron_stppo.rollout.tool_wait import ToolWait
from megatron_stppo.types import Task, Trajectory

if TYPE_CHECKING:
    from megatron_stppo.rollout.engine import Engine

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # (episodes ended, all episodes); called on the group's first rank


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a rollout.

    Example: RolloutSettings(Limits(2048, 500, 500, 7048), temperature=0.0) is greedy.
    """

    limits: Limits
    temperature: float = 1.0
    top_p: float = 1.0
    overlap_tools: bool = True
    concurrency: int = 64  # environment calls at a time
    deadline: float = 30.0  # seconds per environment call
    tool_wait: float = 0.0  # seconds to wait for tools that do not answer


def collect(
    engine: Engine,
    tokenizer: Any,
    tasks: Sequence[Task],
    make_environment: Callable[[], Environment],
    settings: RolloutSettings,
    seed: int,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
    *,
    first_index: int = 0,
    groups: Sequence[int] | None = None,
) -> list[Trajectory]:
    """Play one episode per task. Return the trajectories in task order. Collective over all ranks.

    The result is equal on all ranks of the engine group. Every replica passes its own tasks; `first_index` is
    the number of its first task among the tasks of all replicas. Random numbers depend only on (seed, number
    of the task, turn), not on how tasks are distributed. `groups`: one number per task for Trajectory.group;
    default: the number of the task.

    All ranks raise if any rank failed: EngineFailure if all failures are engine failures, ToolsStayAway if
    all failures are tools that do not answer. Otherwise, a rank with another failure raises its own exception
    and all other ranks raise RolloutError. Raises ConfigError for an environment that returns a
    value of the wrong type.
    """
    assert tokenizer.chat_template is not None, "validation/model_folder.py requires one"
    numbers = range(first_index, first_index + len(tasks))
    episodes = [
        Episode(task, number if groups is None else groups[i], settings.limits, tokenizer)
        for i, (task, number) in enumerate(zip(tasks, numbers, strict=True))
    ]
    rollout = _Rollout(engine, episodes, numbers, settings, seed, group, progress)
    trouble: BaseException | None = None
    try:
        try:
            rollout.run(make_environment)
        finally:
            engine.abort_all()
    except ToolsStayAway as error:  # its message is complete; no traceback is logged
        trouble = error
    except Exception as error:  # raised again below, after all replicas have exchanged their reports
        if not isinstance(error, ConfigError):  # its message is complete
            log.error("rollout failed", exc_info=True)  # logged now, because the exchange may never complete
        trouble = error
    raise_together(_report(trouble), partial(_combined, trouble), _Report, cause=trouble)
    return [episode.trajectory() for episode in episodes]


def request_seed(seed: int, number: int, turn: int) -> int:
    """Return a seed of 63 bits that depends on all three numbers.

    It is the same in every process; the values of Python's `hash` are not.
    """
    digest = hashlib.blake2b(f"{seed}/{number}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class _Report:
    """Why a rank's rollout failed; sent to all other ranks."""

    trouble: str
    place: str = ""  # EngineFailure.place
    misuse: str = ""  # the message of a ConfigError
    away: str = ""  # why the rollout stopped waiting for tools


def _report(trouble: BaseException | None) -> _Report | None:
    if trouble is None:
        return None
    return _Report(
        trouble=f"{type(trouble).__name__}: {trouble}",
        place=trouble.place if isinstance(trouble, EngineFailure) else "",
        misuse=str(trouble) if isinstance(trouble, ConfigError) else "",
        away=str(trouble) if isinstance(trouble, ToolsStayAway) else "",
    )


def _combined(trouble: BaseException | None, reports: dict[int, _Report]) -> BaseException:
    """Return the exception for this rank, whose own one is `trouble`, from the reports of all that failed."""
    failed = list(reports.values())
    if misuse := next((report.misuse for report in failed if report.misuse), ""):
        return ConfigError(misuse)
    if all(report.away for report in failed):
        return ToolsStayAway(failed[0].away)
    said = by_rank({rank: report.trouble for rank, report in reports.items()})
    if all(report.place for report in failed):
        places = by_rank({rank: report.place for rank, report in reports.items()})
        return EngineFailure(f"rollout failed on {said}", places)
    if trouble is not None and not isinstance(trouble, EngineFailure | ToolsStayAway):
        return trouble
    return RolloutError(f"rollout failed on {said}")


@dataclass(frozen=True)
class _News:
    """What the first rank of an engine group broadcasts between two engine steps."""

    answers: tuple[Answer, ...] = ()
    trouble: str = ""
    away: str = ""  # why the rollout stopped waiting for tools


class _Rollout:
    def __init__(
        self,
        engine: Engine,
        episodes: list[Episode],
        numbers: Sequence[int],
        settings: RolloutSettings,
        seed: int,
        group: dist.ProcessGroup | None,
        progress: Progress | None,
    ) -> None:
        self._engine, self._episodes, self._numbers = engine, episodes, numbers
        self._settings, self._seed, self._group = settings, seed, group
        self._progress = progress
        self._alone = dist.get_world_size(group) == 1
        self._first = dist.get_rank(group) == 0
        self._host: EnvironmentHost | None = None  # on the first rank
        self._asked = 0  # environment calls without an answer; equal on every rank
        self._ended = 0

    def run(self, make_environment: Callable[[], Environment]) -> None:
        if not self._first:
            return self._drive()
        settings = self._settings
        rank = dist.get_rank()
        tools = ToolWait(settings.tool_wait, f"rank {rank}: " if rank else "")
        with EnvironmentHost(
            make_environment, concurrency=settings.concurrency, deadline=settings.deadline, tools=tools
        ) as host:
            self._host = host
            self._drive()

    def _drive(self) -> None:
        for index, episode in enumerate(self._episodes):
            self._asked += 1
            if self._host:
                self._host.reset(index, episode.task, request_seed(self._seed, self._numbers[index], 0))
        while self._asked or self._engine.unfinished:
            if self._asked:
                for answer in self._news():
                    self._advance(answer)
            for finished in self._engine.step():
                self._hand_over(finished)

    def _news(self) -> tuple[Answer, ...]:
        """Return the environments' answers, equal on every rank.

        If the engine is idle, wait for at least one.
        """
        news = self._listen() if self._host else _News()
        if not self._alone:  # most engine steps have no news, which is a single broadcast of a length of 0
            body = broadcast_bytes(encode(news) if news != _News() else b"", 0, self._group)
            news = decode(body, _News) if body else _News()
        if news.trouble:
            raise RolloutError(news.trouble)
        if news.away:
            raise ToolsStayAway(news.away)
        return news.answers

    def _listen(self) -> _News:
        assert self._host is not None
        idle = self._engine.unfinished == 0
        wait_for = self._asked if not self._settings.overlap_tools else int(idle)
        try:
            return _News(tuple(self._host.take(wait_for)))
        except RolloutError as error:  # sent to the other ranks before this rank raises
            return _News(trouble=str(error))
        except ToolsStayAway as error:
            return _News(away=str(error))

    def _advance(self, answer: Answer) -> None:
        """Apply an answer: it ends its episode or starts the next turn."""
        self._asked -= 1
        if answer.misuse:
            raise ConfigError(answer.misuse)
        episode = self._episodes[answer.index]
        if answer.failure is not None:
            episode.end(answer.failure, answer.detail)
        elif answer.result is not None:
            episode.answer(answer.result)
        else:
            episode.start(answer.messages, answer.stop_strings)
        if episode.outcome is None:
            self._generate(answer.index)
        else:
            self._end(answer.index)

    def _generate(self, index: int) -> None:
        episode, turn = self._episodes[index], len(self._episodes[index].turns) + 1
        self._engine.add(
            str(index),
            episode.context,
            seed=request_seed(self._seed, self._numbers[index], turn),
            max_tokens=episode.max_tokens,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            stop_strings=episode.stop_strings,
        )

    def _hand_over(self, finished: Finished) -> None:
        """Pass a finished turn to its environment, unless the turn ended the episode."""
        index = int(finished.request_id)
        episode = self._episodes[index]
        episode.add_turn(finished)
        if episode.outcome is not None:
            return self._end(index)
        self._asked += 1
        if self._host:
            self._host.step(index, episode.action(finished))

    def _end(self, index: int) -> None:
        self._ended += 1
        if self._host:
            self._host.close(index)
            if self._progress:
                self._progress(self._ended, len(self._episodes))
