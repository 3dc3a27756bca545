"""Multi-turn rollout in lock-step: play one episode per task, all of which begin together.

Between two engine steps the first rank of an engine group broadcasts the environments' answers (play.py).
With `overlap_tools=False` the rollout waits for all answers and processes them in order of submission; a run
is then bitwise reproducible, whatever the timing of the tools.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_stppo.base.errors import Abandoned, Ending, ToolsStayAway
from megatron_stppo.base.types import Task, Trajectory
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments.base import AnyEnvironment, ToolAway
from megatron_stppo.parallel.collectives import (
    any_rank,
    broadcast_record,
    by_rank,
    gather_failures,
    raise_together,
    refused_together,
)
from megatron_stppo.rollout.episodes.environment_host import (
    BEGINS,
    LONGEST,
    Answer,
    EnvironmentHost,
    ToolWait,
    gave_up,
)
from megatron_stppo.rollout.episodes.episode import Episode, Limits
from megatron_stppo.rollout.episodes.play import Player
from megatron_stppo.rollout.vllm.generation import EngineFailure, RolloutError

if TYPE_CHECKING:
    from megatron_stppo.rollout.vllm.engine import Engine

log = logging.getLogger(__name__)
# Seconds that a failed rank waits for the others of its engine, after those for which environments may close.
# The others are in the same step, or wait for it.
ALONE = 60.0
ROUND = 0.5  # seconds after which ranks that wait for environments look whether they must abandon them
LOOK = 0.02  # the same, of ranks that wait for other ranks
# Errors that ranks exchange, by their names.
KINDS: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (Abandoned, ConfigError, EngineFailure, RolloutError, ToolsStayAway)
}
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
    tasks: Sequence[Task],
    make_environment: Callable[[], AnyEnvironment],
    settings: RolloutSettings,
    seed: int,
    progress: Progress | None = None,
    *,
    first_index: int = 0,
    groups: Sequence[int] | None = None,
    stop: Callable[[], str] | None = None,
) -> list[Trajectory]:
    """Play one episode per task. Return the trajectories in task order. Collective over all ranks.

    The result is equal on all ranks of the engine group. Every replica passes its own tasks; `first_index` is
    the number of its first task among the tasks of all replicas. Random numbers depend only on (seed, number
    of the task, turn), not on how tasks are distributed. `groups`: one number per task for Trajectory.group;
    default: the number of the task. stop: returns why the episodes must be abandoned, or "", on all ranks if
    on one; soon after that, all ranks raise Abandoned.

    All ranks raise if any rank failed: EngineFailure if all failures are engine failures, ToolsStayAway if
    all failures are tools that do not answer. Otherwise, a rank with another failure raises its own exception
    and all other ranks raise RolloutError. Raises ConfigError for an object that is not an
    environment.
    Raises RolloutError on a rank that failed alone while the others of its engine wait for it, and only
    there: the process has to end, so that the launcher ends the others.
    """
    assert engine.tokenizer.chat_template is not None, "validation/model_folder.py requires one"
    numbers = range(first_index, first_index + len(tasks))
    started = [
        Episode(
            task,
            number if groups is None else groups[index],
            settings.limits,
            engine.tokenizer,
            engine.end_ids,
            index,
            seed,
            number,
            settings.temperature,
            settings.top_p,
        )
        for index, (task, number) in enumerate(zip(tasks, numbers, strict=True))
    ]
    trouble: Exception | None = None
    try:
        try:
            _play(engine, started, make_environment, settings, progress, stop)
        finally:
            engine.abort_all()
    except Exception as error:  # raised again below, after all replicas have exchanged their reports
        if not isinstance(error, Ending):  # its message is complete
            log.error("rollout failed", exc_info=True)  # logged now, because the exchange may never complete
        trouble = error
    meet(trouble, engine.group, settings.deadline + ALONE)
    if stop is not None:
        wait_for_all(stop)
    raise_together(_report(trouble), partial(_combined, trouble), _Report, cause=trouble)
    return [episode.trajectory() for episode in started]


def open_together(
    make: Callable[[], Callable[[], AnyEnvironment]], section: EnvironmentConfig, resume: bool
) -> Callable[[], AnyEnvironment]:
    """Return make(), which returns a function that makes the environment of an episode. Collective.

    With `resume` it waits, as a rollout does, while a tool of any rank does not answer. If the tools do not
    answer in time, it raises ToolsStayAway on all ranks. In a new run it does not wait and raises
    ConfigError, because the address may be wrong. A ConfigError of one rank, which perhaps lacks a file or a
    package, is raised on all ranks.
    """
    patience, began, waits = section.tool_wait if resume else 0.0, time.monotonic(), False
    while True:
        away: ToolAway | None = None
        with refused_together():
            try:
                made = make()
            except ToolAway as error:
                away = error
        reasons = list(gather_failures(str(away) if away else None, str).values())
        if not reasons:
            if waits and dist.get_rank() == 0:
                log.warning("tools answer again after %.0f s", time.monotonic() - began)
            return made
        if any_rank(time.monotonic() - began >= patience):
            if resume:
                raise ToolsStayAway(gave_up(patience, reasons[0]))
            if isinstance(away, ConfigError):
                raise away
            raise ConfigError(f"environment.kind={section.kind}: {reasons[0]}; start its tools")
        if not waits and dist.get_rank() == 0:
            log.warning(BEGINS, "", reasons[0], patience)
        waits = True
        time.sleep(min(LONGEST, patience))


def meet(trouble: BaseException | None, group: dist.ProcessGroup | None, seconds: float) -> None:
    """Wait until all ranks of an engine have ended their rollout. Collective over `group`, which is of gloo.

    trouble: why this rank's rollout failed, or None. If it failed, and another rank does not arrive within
    `seconds`, that rank waits in a collective of vLLM that this rank has left, and would wait until the
    deadline of the rollout. Raises RolloutError in this case.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    met = dist.barrier(group, async_op=True)
    if trouble is None:
        met.wait()
        return
    try:
        met.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        said = f"{type(trouble).__name__}: {trouble}"
        raise RolloutError(
            f"the rollout failed on rank {dist.get_rank()}, and the other ranks of its engine did not end "
            f"theirs within {seconds:g} s: {said}"
        ) from error


def wait_for_all(stop: Callable[[], str]) -> None:
    """Wait until all ranks have ended their episodes. Collective.

    Calls `stop` meanwhile: a rank that waits in a collective handles no signal, and could not tell the others
    of one.
    """
    ended = dist.all_reduce(torch.zeros(1), async_op=True)
    while not ended.is_completed():
        stop()
        time.sleep(LOOK)
    ended.wait()


@dataclass(frozen=True)
class _Report:
    """Why a rank's rollout failed; sent to all other ranks."""

    kind: str  # of KINDS, or "" for another error
    text: str
    trouble: str  # the text with the type of the error
    place: str = ""  # EngineFailure.place


def _report(trouble: BaseException | None) -> _Report | None:
    if trouble is None:
        return None
    place = trouble.place if isinstance(trouble, EngineFailure) else ""
    return _Report(_kind(trouble), str(trouble), f"{type(trouble).__name__}: {trouble}", place)


def _kind(error: BaseException) -> str:
    return next((name for name, kind in KINDS.items() if isinstance(error, kind)), "")


def _combined(trouble: BaseException | None, reports: dict[int, _Report]) -> BaseException:
    """Return the exception for this rank, whose own one is `trouble`, from the reports of all that failed."""
    kinds = {report.kind for report in reports.values()}
    text = {report.kind: report.text for report in reversed(reports.values())}  # of the first rank of a kind
    if "ConfigError" in kinds:
        return ConfigError(text["ConfigError"])
    if "Abandoned" in kinds and kinds <= {"Abandoned", "ToolsStayAway", "EngineFailure"}:
        return Abandoned(text["Abandoned"])  # the run leaves anyway, with a checkpoint
    if kinds == {"ToolsStayAway"}:
        return ToolsStayAway(text["ToolsStayAway"])
    said = by_rank({rank: report.trouble for rank, report in reports.items()})
    if kinds == {"EngineFailure"}:
        places = by_rank({rank: report.place for rank, report in reports.items()})
        return EngineFailure(f"rollout failed on {said}", places)
    if trouble is not None and not isinstance(trouble, EngineFailure | ToolsStayAway):
        return trouble
    return RolloutError(f"rollout failed on {said}")


def _play(
    engine: Engine,
    episodes: Sequence[Episode],
    make_environment: Callable[[], AnyEnvironment],
    settings: RolloutSettings,
    progress: Progress | None,
    stop: Callable[[], str] | None,
) -> None:
    """Play the episodes to their ends, with environments on the first rank of the group."""
    host: EnvironmentHost | None = None
    if dist.get_rank(engine.group) == 0:
        tools = ToolWait(settings.tool_wait, f"rank {rank}: " if (rank := dist.get_rank()) else "")
        host = EnvironmentHost(
            make_environment, concurrency=settings.concurrency, deadline=settings.deadline, tools=tools
        )
    with host or nullcontext():
        player, ended = Player(engine, host), 0
        player.begin(episodes)
        while player.asked or player.runs:
            # an engine without requests waits for at least one answer
            wait_for = int(not player.runs) if settings.overlap_tools else len(player.asked)
            heard = answers_of(host, wait_for, engine.group, stop) if player.asked or stop else ()
            gone = player.apply(heard)
            for _ in gone + player.step():
                ended += 1
                if host and progress:
                    progress(ended, len(episodes))


@dataclass(frozen=True)
class _News:
    """What the first rank of an engine group broadcasts between two engine steps."""

    answers: tuple[Answer, ...] = ()
    waits: bool = False  # the answers are not there yet
    end: tuple[str, str] = ("", "")  # why the rollout ends: of KINDS, and its text


def answers_of(
    host: EnvironmentHost | None,
    wait_for: int,
    group: dist.ProcessGroup | None,
    stop: Callable[[], str] | None = None,
) -> tuple[Answer, ...]:
    """Return at least `wait_for` answers of environments, equal on every rank. Collective over `group`.

    host: on the first rank of the group, elsewhere None. stop: see `collect`. All ranks raise what
    EnvironmentHost.take raises, and Abandoned.
    """
    news = _News(waits=True)
    while news.waits:
        # also called on the other ranks, which have handled their signals since the last broadcast
        if why := stop() if stop else "":
            news = _News(end=("Abandoned", why))
        else:
            news = _News() if host is None else _take(host, wait_for, bool(stop))
        news = broadcast_record(news, _News, 0, group)
    kind, text = news.end
    if kind:
        raise KINDS[kind](text)
    return news.answers


def _take(host: EnvironmentHost, wait_for: int, in_rounds: bool) -> _News:
    """Return the answers, or why there are none: the other ranks get it before this rank raises."""
    try:
        if in_rounds and not host.wait(wait_for, ROUND):
            return _News(waits=True)
        return _News(tuple(host.take(wait_for)))
    except (RolloutError, ToolsStayAway) as error:
        return _News(end=(_kind(error), str(error)))
