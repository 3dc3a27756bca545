"""Reports of the failed episodes of a rollout, and the limit on their number.

A failed episode (outcome error or timeout) does not contribute to the loss. Without a limit, a run could
silently continue to train on the few episodes that are left. Episodes that called a tool are counted
separately: if few episodes call a tool, a broken tool makes only a small share of all episodes fail.
"""

import inspect
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path

from megatron_stppo.base.errors import TooManyFailures
from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import FAILED, Summary, Trajectory
from megatron_stppo.environments.base import MALFORMED_CALLS
from megatron_stppo.environments.contract import METRIC_RULE

ENOUGH = 20  # episodes that called a tool; with fewer, the share of failures may be chance
NAMED = 3  # overlong prompts, and metrics, listed in a report
KINDS = 8  # of failures, of which a rollout logs the first one
FRAMES = 4  # of a traceback, the innermost of the user's code
CALLERS = (
    "agents/endpoint/environment.py",
    "environments/contract.py",
    "rollout/episodes/environment_host.py",
)
log = logging.getLogger(__name__)


class FailureLimit:
    """The limit that ends a run in which more than a share `rate` of the episodes fail.

    The share is computed over all episodes of a rollout, and over the episodes that called a tool. The latter
    are summed over rollouts until there are at least ENOUGH of them; then the counts restart at 0.
    The state is equal on all ranks, because all ranks pass the same trajectories.
    Example: rate=0.2; in every rollout of 64 episodes, 7 call a tool and all 7 fail. The first two rollouts
    are below the limit (11 %). After the third, 21 of 21 episodes that called a tool have failed, and the run
    ends.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._failed, self._used = rate, 0, 0

    def check(self, played: Sequence[Summary], own: Sequence[Trajectory] = ()) -> None:
        """Count the failures of a rollout; `played` are the trajectories of all ranks, `own` of this one.

        An episode that was not played, because its environment gave a prompt that is too long, is not
        counted, unless no episode was played. Raises TooManyFailures, which names the counts, the
        configuration field and the first failure, and has the trajectories of this rank.
        """
        if fault := self._fault(played):
            error = TooManyFailures(fault)
            error.own = own
            raise error

    def _fault(self, played: Sequence[Summary]) -> str:
        """Count the failures. Return why there are too many, or ""."""
        episodes = [t for t in played if t.branch == 0]  # an episode counts once
        played = [t for t in episodes if not t.overlong_prompt]
        if episodes and not played:
            return f"all {len(episodes)} prompts are too long; the first: {_reason(episodes[0])}"
        failed = [t for t in played if t.outcome in FAILED]
        if len(failed) > self._rate * len(played):
            return self._share(len(failed), len(played), "episodes failed", failed)
        used = [t for t in played if t.tool_calls]
        self._used += len(used)
        self._failed += sum(t.outcome in FAILED for t in used)
        if self._used < ENOUGH:
            return ""
        if self._failed > self._rate * self._used:
            return self._share(self._failed, self._used, "episodes that called a tool failed", failed)
        self._failed = self._used = 0
        return ""

    def _share(self, count: int, of: int, what: str, failed: Sequence[Summary]) -> str:
        first = f"; the first: {_reason(failed[0])}" if failed else ""
        return (
            f"{count} of {of} {what} ({count / of:.0%}), more than "
            f"environment.max_failure_rate={self._rate:g} allows{first}"
        )


class FailureLines:
    """Logs failures of environment calls in one line each, the first one of each kind until `renew`.

    A kind is the exception's type and the line that raised it. The line has the innermost frames; the level
    DEBUG has the whole traceback.
    Example: "episode 3: environment failed: KeyError: 'x' (tools.py:31 in look_up < guess.py:12 in step)".
    """

    def __init__(self, to: logging.Logger) -> None:
        self._log, self._shown = to, set[Hashable]()

    def renew(self) -> None:
        """Begin a new rollout. May be called by any thread."""
        self._shown = set()

    def log(self, what: str, error: BaseException, detail: str) -> None:
        """Log `what` happened in an episode. detail: the error in one line."""
        frames = list(reversed(traceback.extract_tb(error.__traceback__)))
        kind = type(error), *((frames[0].filename, frames[0].lineno) if frames else ())
        self._log.debug("%s", what, exc_info=error)
        theirs = [f for f in frames if not f.filename.endswith(CALLERS)][:FRAMES]
        where = " < ".join(_place(f.filename, f.lineno, f.name) for f in theirs)
        self.once(kind, f"{what}: {detail}{one_line(f' ({where})' if where else '')}")

    def once(self, kind: Hashable, line: str) -> None:
        """Log a line, the first one of its kind."""
        if kind not in self._shown and len(self._shown) < KINDS:
            self._shown.add(kind)
            self._log.error("%s", line)


def _place(file: str, line: int | None, name: str) -> str:
    return f"{Path(file).name}:{line} in {name}"


def coroutines_of(thread: int) -> str:
    """Return where the coroutines of the user's code are that a thread's event loop runs at this moment.

    Innermost first, without the functions that they call: the line to change is that of the coroutine. If an
    ordinary function of the user is called instead of a coroutine, it is named. "" if the event loop waits.
    Example: "tools.py:31 in look_up < guess.py:12 in step".
    """
    places, inner = list[str](), ""
    for frame, line in traceback.walk_stack(sys._current_frames().get(thread)):
        code, here = frame.f_code, _place(frame.f_code.co_filename, line, frame.f_code.co_qualname)
        if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            if code.co_filename.endswith(CALLERS):
                return one_line(" < ".join(places[:FRAMES] or [inner]))
            places.append(here)
        inner = here
    return one_line(" < ".join(places[:FRAMES]))


def described(error: BaseException) -> str:
    """Return the type and the text of any exception, as "KeyError: 'x'"."""
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """Return the text of any exception, also of one whose __str__ fails."""
    try:
        return str(error)
    except Exception:
        return "its text cannot be read"


def warn(where: str, played: Sequence[Summary], rank: int) -> None:
    """Log the lines of `report` on rank 0. Example: warn("iteration 3", played, rank)."""
    for line in report(played) if rank == 0 else ():
        log.warning("%s: %s", where, line)


def report(played: Sequence[Summary]) -> list[str]:
    """Return at most four lines: on failed episodes, overlong prompts, metrics and calls of tools.

    The first line counts the failures by kind and gives the reason of the first one.
    Example: ["2 of 64 episodes failed (1 error, 1 timeout), 2 of the 9 that called a tool; the first: task
    17: error: retrieval: status 401", "1 of 64 prompts was too long and is not played: task 30: prompt of
    148 tokens exceeds rollout.max_prompt_tokens=60"].
    """
    played = [t for t in played if t.branch == 0]
    overlong = [t for t in played if t.overlong_prompt]
    failed = [t for t in played if t.outcome in FAILED and not t.overlong_prompt]
    lines = []
    if failed:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(t.outcome for t in failed).items()))
        with_tool, used = sum(t.tool_calls > 0 for t in failed), sum(t.tool_calls > 0 for t in played)
        of_tools = f", {with_tool} of the {used} that called a tool" if with_tool else ""
        count = f"{len(failed)} of {len(played)} episodes failed ({kinds}){of_tools}"
        lines.append(f"{count}; the first: {_reason(failed[0])}")
    if overlong:
        named = {t.index: f"task {t.index}: {one_line(t.detail)}" for t in overlong}
        said = "; ".join(list(named.values())[:NAMED]) + ("; ..." if len(named) > NAMED else "")
        were = "prompts were too long and are" if len(overlong) > 1 else "prompts was too long and is"
        lines.append(f"{len(overlong)} of {len(played)} {were} not played: {said}")
    if unusable := Counter(name for t in played for name, value in t.metrics.items() if value is None):
        said = ", ".join(sorted(unusable)[:NAMED]) + (", ..." if len(unusable) > NAMED else "")
        lines.append(f"metrics that are left out: {unusable.total()} ({said}); {METRIC_RULE}")
    if malformed := [calls for t in played if (calls := t.metrics.get(MALFORMED_CALLS))]:
        lines.append(
            f"{sum(malformed):.0f} completions of {len(malformed)} of {len(played)} episodes have calls of "
            "tools that environment.tool_parser cannot read; the agent gets them as text"
        )
    return lines


def _reason(t: Summary) -> str:
    return f"task {t.index}: {t.outcome}: {one_line(t.detail)}"
