"""A request of an agent and the reply to it, whichever API it uses."""

import json
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from megatron_stppo.agents.protocols.body import Refusal
from megatron_stppo.agents.protocols.chat_messages import function_call, split_thinking

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """A completion, as text and as tokens.

    Example: Reply("Hi", (), "stop", None, 2, (1, 2), (5, 9), ("Hi", ""), (-0.1, -2.0)).
    """

    text: str  # without the calls of tools, and without the stop string unless the client asked for it
    calls: tuple[tuple[str, str, str], ...]  # (id, name of the function, arguments as JSON)
    finish_reason: str
    stop_reason: str | None  # the stop string
    prompt_tokens: int
    prompt_ids: tuple[int, ...]  # at least one if the client asked for token ids, else none
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]  # the text of each token if the client asked for log-probs, else none
    logprobs: tuple[float, ...]

    @property
    def tool_calls(self) -> list[Json]:
        return [function_call(*call) for call in self.calls]

    def parts(self, thinking: bool) -> tuple[str, str | None]:
        """Return (thinking, text), the text without it; None for a text that is empty and not alone.

        thinking: False leaves it in the text.
        """
        thought, text = split_thinking(self.text) if thinking else ("", self.text)
        return thought, text if text.strip() or not (thought or self.calls) else None


@dataclass
class Ask:
    """One request of an agent for a completion.

    Example: Ask("text", "Once upon", api="text") of a text completion.
    """

    kind: Hashable  # see Histories: what must be equal for a history to be continued
    units: Sequence[Hashable]  # see Histories
    api: str  # in whose form the reply is sent: chat, text, messages or responses
    messages: list[dict[str, Any]] = field(default_factory=list)  # of a chat
    tools: list[dict[str, Any]] = field(default_factory=list)
    stop: tuple[str, ...] = ()
    keep_stop: bool = False  # whether the stop string is part of the returned text
    max_tokens: int | None = None
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False  # whether they are returned
    thinking: bool = False  # messages, responses: whether thinking is sent apart from the text
    sealed: bool = False  # responses: whether the client wants thinking in a form that it can send back
    # of a tool's arguments, by its name
    strict: dict[str, Draft202012Validator] = field(default_factory=dict)
    namespaces: dict[str, str | None] = field(default_factory=dict)  # responses: by the name of a tool
    counts: bool = False  # asks for the number of tokens instead of a completion
    request: ChatCompletionRequest | None = None  # for a tool parser; None if no tool may be called
    digest: bytes = b""  # equal for equal requests
    is_retry: bool = False  # the client says so
    abandoned: bool = False  # the client has closed the connection without reading the reply
    reply: Future[Reply | int | Refusal] = field(default_factory=Future)

    @property
    def chat(self) -> bool:
        return self.api != "text"

    def forget(self) -> None:
        """Drop the conversation, which is not needed once a reply is made."""
        self.kind, self.units, self.messages, self.tools, self.request = None, (), [], [], None


def event(kind: str, **data: object) -> str:
    """Return a server-sent event with a name."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | data)}\n\n"
