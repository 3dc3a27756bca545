"""Records one episode: turns requests of its agent into tokens to read, and turns into replies.

Repeated requests. A request is answered with the completion that an equal request got, instead of a new one,
if the client says that it repeats it (the header x-stainless-retry-count of OpenAI's clients is above 0), or
if it has closed the connection of the earlier request without reading the answer (Ask.abandoned). Every
completion is thus recorded once. An equal request without these signs gets a second sample, in a history of
its own.

A history is what the policy has read and written in one conversation. It is compared in *units*, which are
what a client can repeat exactly: messages of a chat, characters of a text, or token ids. Its tokens are those
that the engine has read and sampled; they are never encoded again.

A request continues a history if it begins with all its units, and its last completion has units (a text
completion may be empty). If it begins only with those up to an earlier completion (an edited or shortened
conversation, or the same question asked twice), a new history begins, which shares the tokens up to that
completion. Otherwise a new history begins without shared tokens.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParser

from megatron_stppo.agents.protocols.body import Refusal
from megatron_stppo.agents.protocols.exchange import Ask, AssistantTurn, Reply, compared, template_messages
from megatron_stppo.config import ConfigError
from megatron_stppo.data.text.conversation import encode_after, encode_conversation
from megatron_stppo.data.text.plain_text import beginning, decode_plain, encode_plain
from megatron_stppo.environments.base import Completion, Request


@dataclass(frozen=True)
class Match:
    """How far the units of a request are recorded already.

    Example: Match(1, 3, (5, 9, 7), continues=True): the request begins with the 3 units of history 1, whose
    3 tokens end with a completion; what follows them is new.
    """

    history: int  # the number of the history that the completion is recorded in
    units: int  # how many units of the request have been recorded; the last of them is a completion
    tokens: tuple[int, ...]  # of these units
    continues: bool  # False: the history is a new one


@dataclass
class _Conversation:
    kind: Hashable
    units: Sequence[Hashable]
    tokens: list[int]
    # (units, tokens) up to each completion; None for one without units, which no request can repeat
    ends: list[tuple[int | None, int]] = field(default_factory=list)


class Histories:
    """The recorded histories of one episode; see the module.

    Example, with letters as units: after record(place("", "ab"), "", "ab", "X", new=(1, 2), completion=(7,)),
    place("", "abXc") is Match(0, 3, (1, 2, 7), True), and place("", "ac") is Match(1, 0, (), False).
    """

    def __init__(self) -> None:
        self._recorded: list[_Conversation] = []

    def __len__(self) -> int:
        return len(self._recorded)

    def place(self, kind: Hashable, units: Sequence[Hashable]) -> Match:
        """Return the place of a request.

        kind: what else must be equal, such as the tools of a chat. units: of one type per kind. The longest
        recorded beginning is taken; of equal ones that of a history that can be continued, then the oldest.
        """
        beginnings = [  # (units, continues, -history, tokens)
            (end, position == len(history.ends) - 1, -number, tokens)
            for number, history in enumerate(self._recorded)
            for position, (end, tokens) in enumerate(history.ends)
            if end is not None and history.kind == kind and history.units[:end] == units[:end]
        ]
        if not beginnings:
            return Match(len(self), 0, (), continues=False)
        end, continues, number, tokens = max(beginnings)
        shared = tuple(self._recorded[-number].tokens[:tokens])
        return Match(-number if continues else len(self), end, shared, continues)

    def record(
        self,
        place: Match,
        kind: Hashable,
        units: Any,
        added: Any,
        new: Sequence[int],
        completion: Sequence[int],
    ) -> None:
        """Record a completion at the place of its request, to which nothing was recorded in between.

        units: of the request. added: those with which the client will repeat the completion; none for a text
        completion without text: an equal request then asks for another sample. new: the ids of what was new
        in the request. completion: the sampled ids.
        """
        if not place.continues:
            self._recorded.append(_Conversation(kind, (), list(place.tokens)))
        history = self._recorded[place.history]
        history.units = units + added
        history.tokens += [*new, *completion]
        history.ends.append((len(history.units) if added else None, len(history.tokens)))


ParseTools = Callable[[Any, Any], ToolParser]  # a class of vLLM's parsers: (tokenizer, tools) -> parser
Calls = tuple[tuple[str, str], ...]  # (name of the function, arguments as JSON)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rules:
    """What is equal for all episodes of a run.

    tokenizer: used by one thread at a time, which must not be the engine's. ends: ids of end-of-text tokens.
    """

    tokenizer: Any
    ends: Collection[int]
    vocabulary: int
    max_context: int
    max_completions: int  # environment.max_turns
    parser: ParseTools | None = None


class Recorder:
    """The histories of one episode, and the request that is being answered.

    Example: ask(first) returns a Request; complete(turn) then returns the Reply to it.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._histories = Histories()
        self._answered: dict[bytes, tuple[Ask, Reply]] = {}  # by digest, the newest
        self._current: tuple[Ask, Match, list[int]] | None = None  # what the engine generates
        self.completions = 0
        self.tool_calls = 0  # that the last completion made
        self.malformed_calls = 0  # completions with calls that cannot be parsed
        self.repeated = 0  # requests that got a recorded reply
        self._limited = ""  # why a request was refused, if the policy is the cause
        self._cut = False  # the last completion is one of the Responses API, and is incomplete

    def ask(self, ask: Ask) -> Request | Reply:
        """Return what the policy reads next, or the recorded reply to a repeated request. Raises Refusal."""
        earlier, reply = self._answered.get(ask.digest, (None, None))
        if earlier is not None and reply is not None and (ask.is_retry or earlier.abandoned):
            self._answered[ask.digest] = ask, reply
            self.repeated += 1
            ask.forget()
            return reply
        if self.completions >= self._rules.max_completions:
            self._limit(
                f"the episode has had environment.max_turns={self._rules.max_completions} completions",
                "turn_limit",
            )
        match = self._histories.place(ask.kind, ask.units)
        most = self._rules.max_context
        new = self._new_ids(ask, match, most)
        tokens = len(match.tokens) + len(new)
        if tokens >= most:
            many = f"at least {tokens}" if len(new) > most else tokens
            self._limit(
                f"the prompt has {many} tokens, and rollout.max_context={most} leaves no room for a turn",
                "context_length_exceeded",
            )
        if tokens == 0:
            raise Refusal(400, "the prompt has no tokens")
        self._current = ask, match, new
        ids = new if match.continues else [*match.tokens, *new]
        return Request(match.history, tuple(ids), ask.stop, ask.max_tokens)

    def count(self, ask: Ask) -> int:
        """Return the number of tokens that the policy would read for a request. Raises Refusal."""
        match = self._histories.place(ask.kind, ask.units)
        return len(match.tokens) + len(self._new_ids(ask, match))

    def complete(self, completion: Completion) -> tuple[Ask, Reply]:
        """Record the turn that the last Request has got. Return the ask to which it is the reply."""
        assert self._current is not None, "a completion without a request"
        (ask, match, new), self._current = self._current, None
        self.completions += 1
        reply = self._reply(ask, (*match.tokens, *new), completion)
        self.tool_calls = len(reply.calls)
        self._cut = ask.api == "responses" and reply.finish_reason == "length"
        self._histories.record(match, ask.kind, ask.units, _repeated(ask, reply), new, completion.token_ids)
        self._answered[ask.digest] = ask, reply
        ask.forget()  # otherwise an episode would keep the whole conversation once per turn
        return ask, reply

    @property
    def generating(self) -> Ask | None:
        """The ask for which a turn is generated."""
        return self._current[0] if self._current is not None else None

    @property
    def reached_limit(self) -> str:
        """Why the policy is the cause if the agent fails now, or "".

        Clients of the Responses API may raise an exception for an incomplete reply, as openai-agents does.
        """
        return self._limited or (self._cut and "the last completion is incomplete") or ""

    def _limit(self, why: str, code: str) -> None:
        self._limited = why
        raise Refusal(400, why, code)

    def _new_ids(self, ask: Ask, match: Match, most: int | None = None) -> list[int]:
        """Return the ids that the policy has not read yet; for `most` see encode_marked. Raises Refusal."""
        tokenizer, recorded = self._rules.tokenizer, match.units
        try:
            if ask.chat and recorded:
                last, ends = match.tokens[-1], self._rules.ends
                return encode_after(tokenizer, ask.messages, ask.tools, recorded - 1, last, ends, most)
            if ask.chat:
                return encode_conversation(tokenizer, ask.messages, ask.tools, most)
        except ConfigError as error:  # the template rejects the agent's messages
            raise Refusal(400, str(error)) from None
        except Exception as error:  # a template may fail in any way on messages that it was not written for
            log.warning("the chat template failed on an agent's messages", exc_info=True)
            said = f"{type(error).__name__}: {error}"
            raise Refusal(400, f"messages: the chat template cannot render them ({said})") from None
        rest: Any = ask.units[recorded:]
        if isinstance(rest, str):
            encode = encode_plain if recorded else _begun
            return encode(tokenizer, rest if most is None else beginning(tokenizer, rest, most + 1, encode))
        if not all(0 <= number < self._rules.vocabulary for number in rest):
            raise Refusal(400, f"prompt: token ids must lie in [0, {self._rules.vocabulary})")
        return list(rest)

    def _reply(self, ask: Ask, prompt_ids: tuple[int, ...], completion: Completion) -> Reply:
        text, stop = _until_stop(completion.text, ask)
        content, calls = self._calls(ask, text)
        finish = "length" if completion.reason == "length" else "tool_calls" if calls else "stop"
        return Reply(
            text=content,
            calls=calls,
            finish_reason=finish,
            stop_reason=stop,
            prompt_tokens=len(prompt_ids),
            prompt_ids=prompt_ids if ask.token_ids else (),
            token_ids=completion.token_ids,
            pieces=tuple(decode_plain(self._rules.tokenizer, [number]) for number in completion.token_ids)
            if ask.logprobs
            else (),
            logprobs=completion.logprobs,
        )

    def _calls(self, ask: Ask, text: str) -> tuple[str, tuple[tuple[str, str, str], ...]]:
        """Return (the text without calls, the calls of tools).

        Ids have 9 letters and digits, as Mistral's template requires, and are equal if a run is repeated.
        """
        if ask.request is None or self._rules.parser is None:
            return text, ()
        content, calls, malformed = _parse(self._rules.parser, self._rules.tokenizer, ask.request, text)
        if not all(_is_valid(ask, name, arguments) for name, arguments in calls):
            content, calls, malformed = text, (), True
        self.malformed_calls += malformed
        return content, tuple(
            (f"call{self.completions % 1000:03d}{n % 100:02d}", *call) for n, call in enumerate(calls)
        )


def _repeated(ask: Ask, reply: Reply) -> Any:
    """Return the units with which a client repeats the completion, after those of the request."""
    if not ask.chat:
        return reply.text if isinstance(ask.units, str) else reply.token_ids
    (message,) = template_messages([AssistantTurn(reply.text, calls=reply.tool_calls).message()])
    return (compared(message),)


def _begun(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text after the tokenizer's beginning (<s>). Special tokens in it are text."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=True, split_special_tokens=True)
    return ids


def _until_stop(text: str, ask: Ask) -> tuple[str, str | None]:
    """Return the text up to the first stop string, and that string if there is one."""
    places = [(text.find(stop), stop) for stop in ask.stop if stop in text]
    if not places:
        return text, None
    start, stop = min(places)
    return text[: start + (len(stop) if ask.keep_stop else 0)], stop


def _parse(
    make: ParseTools, tokenizer: Any, request: ChatCompletionRequest, text: str
) -> tuple[str, Calls, bool]:
    """Return (the text without calls, the calls, whether there are calls that cannot be read).

    The policy may write anything. Parsers then log a traceback, or raise: neither is an error of the run.
    """
    parser = make(tokenizer, request.tools)
    with _withheld(type(parser)) as complaints:
        try:
            parsed = parser.extract_tool_calls(text, request)
            calls = tuple((call.function.name, call.function.arguments) for call in parsed.tool_calls)
            for call in calls:  # half a surrogate pair in JSON ("\ud83d") cannot be sent
                "".join(call).encode()
        except Exception:
            return text, (), True
    if not parsed.tools_called:
        return text, (), bool(complaints)
    return parsed.content or "", calls, bool(complaints)


def _is_valid(ask: Ask, name: str, arguments: str) -> bool:
    """Return whether a call has arguments of the form that the client relies on."""
    if ask.api != "messages" and name not in ask.strict:
        return True
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])  # which the Messages API sends as objects
        return name not in ask.strict or ask.strict[name].is_valid(given)
    except Exception:  # also of a schema, whose references and expressions are the client's
        return False


@contextmanager
def _withheld(parser: type) -> Iterator[Sequence[logging.LogRecord]]:
    """Yield the warnings and errors that the modules of a parser log in the block, which are not shown."""
    records: list[logging.LogRecord] = []

    def shown(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            records.append(record)
        return record.levelno < logging.WARNING

    loggers = [logging.getLogger(name) for name in {kind.__module__ for kind in parser.__mro__}]
    for logger in loggers:
        logger.addFilter(shown)
    try:
        yield records
    finally:
        for logger in loggers:
            logger.removeFilter(shown)
