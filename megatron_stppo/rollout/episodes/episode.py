"""The state of one episode: the tokens that the policy has read and written so far, and the outcome.

Every rank of an engine group holds the same Episode objects and passes them the same answers. All ranks
therefore have the same tokens without exchanging them.

- The prompt is the chat template applied to the environment's messages (data/text/chat.py: special tokens in
  a message are plain text). Nothing is tokenised twice: turns are the engine's token ids, and an observation
  is encoded once, with special tokens in it as plain text.
- An observation is a part of the assistant's message if the environment has stop strings, unless the turn
  ended with an end-of-text token. Else it is a message of the user, in the form of the chat template, unless
  `environment.after_end` is `text`.
- A turn cut by the limit on its tokens goes to the environment unchanged. It rarely parses and is then an
  invalid action. Before a message of the user, the template's end-of-text token closes it: the policy reads
  this token, as it would in any conversation, and is not trained to write it there.
- If the context is full, the episode ends as truncated. It also ends as truncated if an observation leaves no
  room for an answer; that observation is dropped, because the policy never reads it.
- The reward of an environment step belongs to the turn that it evaluates.
- An agent (CompletionEnvironment) sends requests instead of messages and observations: token ids, which are
  taken as they are. Its episode may have several histories; the reward belongs to the last turn of each. A
  full context does not end it, because the agent may go on with another history.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Branch, Message, Outcome, Task, Trajectory, Turn
from megatron_stppo.config import Config
from megatron_stppo.data.text.chat import encode_chat
from megatron_stppo.data.text.conversation import encode_after
from megatron_stppo.data.text.plain_text import beginning, decode_plain, encode_plain
from megatron_stppo.environments.base import Completion, Request, StepResult
from megatron_stppo.rollout.vllm.generation import Finished, Reason, Record, RecordedHistory, RecordedTurn

# A closing tag at the end of an observation, such as "</information>\n\n". An observation that is too long is
# cut before this tag, so that the tag stays.
_CLOSING = re.compile(r"</[A-Za-z_]{1,32}>\s{0,8}\Z")


@dataclass(frozen=True)
class Limits:
    """Token counts, each at least 1. Example: Limits(2048, 500, 500, 7048).

    new_message: whether observations may be messages of the user (environment.after_end).
    """

    max_prompt_tokens: int
    max_turn_tokens: int
    max_observation_tokens: int
    max_context: int
    new_message: bool = True

    @classmethod
    def of(cls, config: Config) -> Self:
        r, e = config.rollout, config.environment
        return cls(
            r.max_prompt_tokens,
            r.max_turn_tokens,
            e.max_observation_tokens,
            config.max_context,
            e.after_end == "message",
        )

    @property
    def prompt(self) -> tuple[int, str]:
        """The largest number of tokens of a prompt, and the field of the configuration that limits it."""
        prompt, context = self.max_prompt_tokens, self.max_context
        return min(
            (prompt, f"rollout.max_prompt_tokens={prompt}"),
            (context - 1, f"rollout.max_context={context}, less 1 for a turn"),
        )


@dataclass
class History:
    """The tokens of one conversation of an episode.

    Example: begin((1, 2)), add(finished) with the token 7, and observe((3,)) give the context [1, 2, 7, 3].
    """

    prompt_ids: tuple[int, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    context: list[int] = field(default_factory=list)  # prompt, turns and observations: the policy's input
    routes: bytearray = field(default_factory=bytearray)  # see Trajectory.routes
    reasons: list[Reason] = field(default_factory=list)  # why each turn ended

    def begin(self, ids: Sequence[int]) -> None:
        self.prompt_ids, self.context = tuple(ids), list(ids)

    def add(self, finished: Finished) -> None:
        self.turns.append(Turn(finished.token_ids, finished.logprobs, (), 0.0, finished.versions))
        self.reasons.append(finished.reason)
        self.context += finished.token_ids
        # A token that was computed again since an earlier turn keeps the experts of that turn.
        self.routes += finished.routes[len(self.routes) :]

    def observe(self, ids: Sequence[int]) -> None:
        """Append what the policy reads after the last turn."""
        self.turns[-1] = replace(self.turns[-1], observation_ids=tuple(ids))
        self.context += ids

    def credit(self, reward: float) -> None:
        """Set the reward of the last turn, if there is one."""
        if self.turns:
            self.turns[-1] = replace(self.turns[-1], reward=reward)

    def branch(self) -> Branch:
        return Branch(self.prompt_ids, tuple(self.turns), bytes(self.routes))

    def recorded(self) -> RecordedHistory:
        turns = (
            RecordedTurn(turn.token_ids, turn.rollout_logprob, turn.versions, reason, turn.observation_ids)
            for turn, reason in zip(self.turns, self.reasons, strict=True)
        )
        return RecordedHistory(self.prompt_ids, tuple(turns))


@dataclass
class Episode:
    """One episode, and how a Player samples its turns.

    Example: start(messages), add_turn(finished), answer(result), .. until `outcome` is set.
    """

    task: Task
    group: int
    limits: Limits
    tokenizer: Any
    ends: Collection[int] = ()  # ids of end-of-text tokens
    index: int = 0  # unique among the episodes in progress; names its requests and its environment
    seed: int = 0  # of the rollout
    place: int = 0  # number of the episode within the rollout
    temperature: float = 1.0
    top_p: float = 1.0
    earlier: Record = ()  # of an earlier attempt, which is continued
    messages: list[dict[str, Any]] = field(default_factory=list)  # the prompt's, and those that began since
    stop_strings: tuple[str, ...] = ()
    histories: list[History] = field(default_factory=lambda: [History()])
    history: int = 0  # the number of the one that is continued
    request: Request | None = None  # of an agent, the last one
    outcome: Outcome | None = None
    tool_calls: int = 0
    valid_actions: int = 0
    detail: str = ""
    overlong_prompt: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)

    @property
    def context(self) -> list[int]:
        """Prompt, turns and observations of the history that is continued: the policy's input."""
        return self._current.context

    @property
    def played(self) -> int:
        """The number of turns of all histories."""
        return sum(len(history.turns) for history in self.histories)

    def start(self, messages: tuple[Message, ...], stop_strings: tuple[str, ...]) -> None:
        """Tokenise the prompt. One that is too long, or that the chat template fails on, ends the episode."""
        self.stop_strings, self.messages = stop_strings, [message.as_dict() for message in messages]
        limit, field = self.limits.prompt
        try:
            ids = encode_chat(self.tokenizer, messages, limit)
        except Exception as error:  # a template may fail in any way on messages that it was not written for
            return self._end_of_template(error)
        self._current.begin(ids[:limit])
        if len(ids) > limit:  # not played; cut, so as not to fill a micro-batch
            self.overlong_prompt = len(ids)
            length = f"more than {limit}" if len(ids) == limit + 1 else len(ids)
            self.end("error", f"prompt of {length} tokens exceeds {field}")

    def ask(self, request: Request) -> None:
        """Continue a history with an agent's request, or begin one."""
        self.request, self.history, self.stop_strings = request, request.history, request.stop_strings
        if request.history == len(self.histories):
            self.histories.append(History())
        if self._current.turns:
            self._current.observe(request.token_ids)
        else:
            self._current.begin(request.token_ids)

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of the next turn."""
        asked = self.request.max_tokens if self.request is not None else None
        return min(self.limits.max_turn_tokens, self._room, self._room if asked is None else asked)

    @property
    def _current(self) -> History:
        return self.histories[self.history]

    @property
    def _room(self) -> int:
        return self.limits.max_context - len(self.context)

    def add_turn(self, finished: Finished) -> None:
        """Append a complete turn. If the context is full, the episode is truncated, except an agent's."""
        self._current.add(finished)
        if finished.reason == "length" and self._room < 1 and self.request is None:
            self.end("truncated", f"context of {self.limits.max_context} tokens is full")

    def completion(self, finished: Finished) -> Completion:
        """Return the turn, for the environment; its text is without the end-of-text token."""
        ids = finished.token_ids[:-1] if finished.reason == "end" else finished.token_ids
        text = decode_plain(self.tokenizer, ids)
        return Completion(text, finished.token_ids, finished.logprobs, finished.reason)

    def answer(self, result: StepResult) -> None:
        """Add the environment's answer to the last turn: reward, observation, and the outcome if done."""
        self.tool_calls += result.tool_calls
        self.valid_actions += result.valid
        self.metrics |= result.metrics
        if result.done:
            for history in self.histories:
                history.credit(result.reward)
            assert result.outcome is not None, "environments/contract.py refuses other results"
            self.end(result.outcome, result.detail)
            return
        self._current.credit(result.reward)
        if result.request is not None:
            return self.ask(result.request)
        try:
            ids = self._observe(result.observation)
        except Exception as error:
            return self._end_of_template(error)
        if len(ids) < self._room:
            self._current.observe(ids)
        else:
            self.end("truncated", f"no room for {len(ids)} observation tokens and an answer")

    def _end_of_template(self, error: Exception) -> None:
        self.end("error", one_line(f"the chat template failed: {type(error).__name__}: {error}"))

    def record(self, running: RecordedTurn | None) -> Record:
        """Return what was played so far. running: the turn that is being generated."""
        histories = [history.recorded() for history in self.histories]
        if running is not None:
            now = histories[self.history]
            histories[self.history] = replace(now, turns=(*now.turns, running))
        return tuple(history for history in histories if history.turns)

    def end(self, outcome: Outcome, detail: str) -> None:
        assert self.outcome is None, f"episode ended twice: {self.outcome}, then {outcome}"
        self.outcome, self.detail = outcome, detail

    def trajectory(self) -> Trajectory:
        """Return the trajectory of the episode, which must have ended."""
        assert self.outcome is not None, "the episode has not ended"
        first, *others = (history.branch() for history in self.histories)
        return Trajectory(
            self.task,
            first.prompt_ids,
            first.turns,
            self.outcome,
            self.group,
            self.tool_calls,
            self.valid_actions,
            self.detail,
            self.overlong_prompt,
            first.routes,
            tuple(others),
            metrics=self.metrics,
        )

    def _observe(self, text: str) -> tuple[int, ...]:
        """Return what the policy reads after the last turn, for an observation of the environment."""
        limit = self.limits.max_observation_tokens
        ids = self._shortened(text, limit)
        is_text = self.stop_strings and self.context[-1] not in self.ends
        if is_text or not self.limits.new_message:
            return ids
        self.messages.append({"role": "assistant", "content": "-"})  # its text has no effect on what follows
        shown = text if len(ids) < limit else decode_plain(self.tokenizer, ids)
        message = self._after_turn(shown)
        if len(message) > limit:  # the limit is that of the whole message
            ids = self._shortened(text, max(1, limit - (len(message) - len(ids))))
            shown = decode_plain(self.tokenizer, ids)
            message = self._after_turn(shown)
        self.messages.append({"role": "user", "content": shown})
        return message

    def _after_turn(self, text: str) -> tuple[int, ...]:
        """Return what follows the last turn if the user's next message is `text`."""
        messages, last = [*self.messages, {"role": "user", "content": text}], self.context[-1]
        return tuple(encode_after(self.tokenizer, messages, None, len(messages) - 2, last, self.ends))

    def _shortened(self, text: str, limit: int) -> tuple[int, ...]:
        """Return the token ids of an observation, at most `limit`."""
        ids = encode_plain(self.tokenizer, beginning(self.tokenizer, text, limit + 1))
        if len(ids) <= limit:
            return tuple(ids)
        closing = _CLOSING.search(text[-64:])
        tail = encode_plain(self.tokenizer, closing.group()) if closing else []
        kept = limit - len(tail) if len(tail) < limit else limit
        return tuple(ids[:kept] + tail[: limit - kept])
