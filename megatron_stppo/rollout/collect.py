"""Multi-turn rollout in lock-step: every rank of an engine group drives the same engine steps.

Environments run on the group's first rank only. Between two engine steps it sends the others what the
environments answered; every rank then advances its own copy of the episodes. A finished turn's successor
enters the engine at once, so tools and generation overlap (continuous batching), and the prefix cache keeps
the history. `overlap_tools=False` waits for all answers, in order of submission: then a run is repeatable
bitwise, whatever the tools' timing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_stppo.config import ConfigError
from megatron_stppo.environments.base import Environment
from megatron_stppo.parallel.collectives import broadcast_bytes, decode, encode, gather_records
from megatron_stppo.resilience.faults import ToolsStayAway
from megatron_stppo.rollout.environment_host import Answer, EnvironmentHost
from megatron_stppo.rollout.episode import Episode, Limits
from megatron_stppo.rollout.generation import EngineFailure, Finished, RolloutError
from megatron_stppo.rollout.tool_wait import ToolWait
from megatron_stppo.types import Task, Trajectory

if TYPE_CHECKING:
    from megatron_stppo.rollout.engine import Engine

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # episodes ended, episodes in all; called on the group's first rank


@dataclass(frozen=True)
class RolloutSettings:
    """Example: RolloutSettings(Limits(2048, 500, 500, 7048), temperature=0.0) is greedy."""

    limits: Limits
    temperature: float = 1.0
    top_p: float = 1.0
    overlap_tools: bool = True
    concurrency: int = 64  # environment calls under way
    deadline: float = 30.0  # seconds per environment call
    tool_wait: float = 0.0  # seconds to wait for tools that answer nobody


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
    """One episode per task; the trajectories in task order, identical on every rank of the engine group.

    Collective over all ranks: every replica calls it with its own tasks, of which `first_index` is the number
    of the first among all replicas'. Random numbers depend on (seed, that number, turn) only, never on how
    tasks are dealt out. `groups`: one number per task for Trajectory.group; default: the task's number.
    Raises EngineFailure on every rank when only engines failed, ToolsStayAway when only tools did,
    RolloutError when anything else did on one of them; ConfigError for a tokenizer without a chat template
    and for an environment that returns what it must not.
    """
    if tokenizer.chat_template is None:
        raise ConfigError("model.path: its tokenizer has no chat_template; add one to tokenizer_config.json")
    numbers = range(first_index, first_index + len(tasks))
    episodes = [
        Episode(task, number if groups is None else groups[i], settings.limits, tokenizer)
        for i, (task, number) in enumerate(zip(tasks, numbers, strict=True))
    ]
    rollout = _Rollout(engine, episodes, numbers, settings, seed, group, progress)
    trouble: BaseException | None = None
    try:
        rollout.run(make_environment)
    except ToolsStayAway as error:  # its line says all
        trouble = error
    except Exception as error:  # raised again below, when the other replicas know
        if not isinstance(error, ConfigError):  # which is one line
            log.error("rollout failed", exc_info=True)  # now: they may never come to hear of it
        trouble = error
    finally:
        engine.abort_all()
    report = _Report(
        trouble=f"{type(trouble).__name__}: {trouble}" if trouble else "",
        mesh=trouble.mesh if isinstance(trouble, EngineFailure) else "",
        misuse=str(trouble) if isinstance(trouble, ConfigError) else "",
        away=str(trouble) if isinstance(trouble, ToolsStayAway) else "",
    )
    _agree(report, trouble)
    return [episode.trajectory() for episode in episodes]


def request_seed(seed: int, number: int, turn: int) -> int:
    """63 bits that depend on all three, the same in every process (Python's hash is not)."""
    digest = hashlib.blake2b(f"{seed}/{number}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class _Report:
    """How a rank's rollout ended, for the others."""

    trouble: str
    mesh: str  # of an engine's failure, else ""
    misuse: str = ""  # what a ConfigError says
    away: str = ""  # why tools were given up


def _agree(report: _Report, trouble: BaseException | None) -> None:
    """Every rank raises, or none does: a rank that went on alone would wait for the others for ever."""
    reports = [of_rank[0] for of_rank in gather_records([report], _Report)]
    misuse = next((report.misuse for report in reports if report.misuse), "")
    if misuse:
        raise ConfigError(misuse) from None
    troubled = {rank: report for rank, report in enumerate(reports) if report.trouble}
    if troubled:
        said = "; ".join(f"rank {rank}: {report.trouble}" for rank, report in troubled.items())
        if all(report.away for report in troubled.values()):
            raise ToolsStayAway(next(report.away for report in troubled.values()))
        if all(report.mesh for report in troubled.values()):
            places = "; ".join(f"rank {rank}: {report.mesh}" for rank, report in troubled.items())
            raise EngineFailure(f"rollout failed on {said}", places) from trouble
        if trouble is not None and not isinstance(trouble, EngineFailure | ToolsStayAway):
            raise trouble
        raise RolloutError(f"rollout failed on {said}") from trouble


@dataclass(frozen=True)
class _News:
    """What the first rank tells its engine group between two steps."""

    answers: tuple[Answer, ...] = ()
    trouble: str = ""
    away: str = ""  # why tools were given up


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
        self._asked = 0  # environment calls under way; every rank knows the number
        self._ended = 0

    def run(self, make_environment: Callable[[], Environment]) -> None:
        if not self._first:
            return self._drive()
        settings = self._settings
        rank = dist.get_rank()
        tools = ToolWait(settings.tool_wait, f"rank {rank}: " if rank else "")
        limits = {"concurrency": settings.concurrency, "deadline": settings.deadline}
        with EnvironmentHost(make_environment, **limits, tools=tools) as host:
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
        """The environments' answers, the same on every rank. With an idle engine there is one at least."""
        news = self._listen() if self._host else None
        if not self._alone:
            news = decode(broadcast_bytes(encode(news) if news else None, 0, self._group), _News)
        assert news is not None
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
        except RolloutError as error:  # the other ranks must hear of it before this one raises
            return _News(trouble=str(error))
        except ToolsStayAway as error:
            return _News(away=str(error))

    def _advance(self, answer: Answer) -> None:
        """An answer ends its episode or leads to its next turn."""
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
        """A finished turn goes to its environment, unless it ended the episode."""
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
