"""The environment of an episode that an agent plays: its requests are the observations.

The agent runs as a task of its own, and stays suspended in a request while the policy writes. Requests that
it sends at the same time are answered one after the other, in the order of their arrival.
"""

import asyncio
import logging
from dataclasses import replace

from megatron_stppo.agents.endpoint.agents import Agent, result_of
from megatron_stppo.agents.endpoint.recorder import Recorder, Rules
from megatron_stppo.agents.endpoint.server import Endpoint
from megatron_stppo.agents.endpoint.session import ENDED, Session
from megatron_stppo.agents.protocols.body import Refusal
from megatron_stppo.agents.protocols.exchange import Ask, Reply
from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Task
from megatron_stppo.environments.base import (
    MALFORMED_CALLS,
    REPEATED,
    AgentEpisode,
    Completion,
    Request,
    StepResult,
    ToolAway,
)

CLOSE_SECONDS = 5.0  # for an agent to end after it was cancelled
log = logging.getLogger(__name__)


class NoCompletion(RuntimeError):
    """An agent has ended without a completion, so that there is nothing to train on."""


class GaveUp(TimeoutError):
    """An agent has ended without a completion, because its client did not wait for one."""


class AgentEnvironment:
    """A CompletionEnvironment. Its methods are called in one event loop, which also runs the agent."""

    def __init__(self, agent: Agent, endpoint: Endpoint, rules: Rules) -> None:
        self._play, self._endpoint, self._rules = agent, endpoint, rules
        self.refused_requests: dict[str, str] = {}  # Session.refusals
        self._session: Session | None = None
        self._agent: asyncio.Task[object] | None = None

    @property
    def tool_calls(self) -> int:
        """Calls of tools that the last completion made."""
        return 0 if self._session is None else self._recorder.tool_calls

    async def reset(self, task: Task, seed: int) -> Request:
        """Start the agent, and return its first request.

        Raises NoCompletion or GaveUp if the agent ends before that, and any exception of the agent. A call
        after ToolAway starts a new agent.
        """
        await self.close()
        self._session, self._recorder = self._endpoint.open(), Recorder(self._rules)
        self._session.refusals = self.refused_requests
        episode = AgentEpisode(
            task, self._endpoint.url(self._session), self._session.token, self._endpoint.model, seed
        )
        self._agent = asyncio.ensure_future(self._played(episode))
        self._agent.add_done_callback(self._session.end)
        request = await self._next(self._session, self._agent)
        if request is None:
            self._agent.result()
            raise _without_completion(self._session)
        return request

    async def complete(self, completion: Completion) -> StepResult:
        """Answer the current request, and return the next one, or the end of the episode.

        Raises what the agent raises. If the policy was the cause, because it used up its turns or its
        context, the episode is truncated instead.
        """
        assert self._session is not None and self._agent is not None, "complete before reset"
        ask, reply = self._recorder.complete(completion)
        calls = self._recorder.tool_calls
        _answer(ask, reply)
        request = await self._next(self._session, self._agent)
        if request is not None:
            return StepResult(
                "", 0.0, done=False, valid=True, tool_calls=calls, request=request, metrics=self._counts()
            )
        end = self._end(self._agent)
        return replace(end, tool_calls=calls, metrics={**end.metrics, **self._counts()})

    async def close(self) -> None:
        """End the agent, and make its key invalid."""
        session, agent, self._session, self._agent = self._session, self._agent, None, None
        if session is not None:
            self._endpoint.shut(session)
            if (ask := self._recorder.generating) is not None:
                _answer(ask, Refusal(410, ENDED))
        if agent is not None and not agent.done():
            agent.cancel()
            await asyncio.wait({agent}, timeout=CLOSE_SECONDS)
            if not agent.done():
                log.error("an agent did not end when it was cancelled; it is abandoned")
        if agent is not None and agent.done() and not agent.cancelled():
            agent.exception()  # otherwise asyncio would log the exception as never retrieved

    def _counts(self) -> dict[str, float]:
        return {MALFORMED_CALLS: self._recorder.malformed_calls, REPEATED: self._recorder.repeated}

    async def _played(self, episode: AgentEpisode) -> object:
        try:
            return await self._play(episode)
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio would leave the loop of all episodes
            raise RuntimeError(f"the agent raised {error!r}") from error

    async def _next(self, session: Session, agent: asyncio.Task[object]) -> Request | None:
        """Return the agent's next request for a new completion; None if the agent has ended."""
        while (ask := await session.next()) is not None:
            if agent.done():
                _answer(ask, Refusal(410, ENDED))
                break
            try:
                answer = self._recorder.count(ask) if ask.counts else self._recorder.ask(ask)
            except Refusal as refusal:
                session.refuse(refusal)
                _answer(ask, refusal)
                continue
            if isinstance(answer, Request):
                return answer
            _answer(ask, answer)
        return None

    def _end(self, agent: asyncio.Task[object]) -> StepResult:
        try:
            returned = agent.result()
        except ToolAway as away:  # a conversation cannot be repeated from its middle
            return StepResult("", 0.0, True, True, outcome="error", detail=one_line(f"tool away: {away}"))
        except Exception:
            if limit := self._recorder.reached_limit:
                return StepResult("", 0.0, True, True, outcome="truncated", detail=limit)
            raise
        return result_of(returned)


def _without_completion(session: Session) -> Exception:
    if session.refused:
        return NoCompletion(f"the agent has ended without a completion; its request: {session.refused}")
    if session.asked:
        return GaveUp("the agent has closed its request before the completion was ready, and has ended")
    return NoCompletion("the agent has ended without asking for a completion")


def _answer(ask: Ask, answer: Reply | int | Refusal) -> None:
    if not ask.reply.done():
        ask.reply.set_result(answer)
