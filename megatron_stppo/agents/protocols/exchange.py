"""A request of an agent and the reply to it, whichever API it uses.

Also the messages of a chat request, as the chat template reads them, and as they are compared with a history.
"""

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from megatron_stppo.agents.protocols.body import Refusal, listed, texts

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


ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass
class AssistantTurn:
    """A turn of the assistant, whose parts other APIs have one by one: thinking, a text, calls of tools."""

    text: str | None = None
    thinking: list[str] = field(default_factory=list)  # joined at the end: a client may send many parts
    calls: list[dict[str, Any]] = field(default_factory=list)  # of function_call

    def message(self) -> dict[str, Any]:
        """Return the turn as one message of a chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or ""}
        parts = {"reasoning_content": "".join(self.thinking), "tool_calls": self.calls}
        return message | {name: part for name, part in parts.items() if part}


def function_call(call: object, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a tool as a chat has it. call: its id."""
    return {"id": str(call), "type": "function", "function": {"name": name, "arguments": arguments}}


def template_messages(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages for the chat template. Raises Refusal for content that is not text.

    Parts of a content are joined. The arguments of tool calls are objects, as templates expect; those that
    are not valid JSON stay text.
    """
    if not given:
        raise Refusal(400, "messages: must have at least one message")
    return [_template_message(f"messages[{place}]", message) for place, message in enumerate(given)]


def compared(message: dict[str, Any]) -> Hashable:
    """Return what must be equal if a client repeats a message of template_messages.

    Ids of tool calls are left out, and so is white space around the text and the thinking of an assistant:
    clients change both, and neither changes which tokens were sampled. Thinking is equal whether it is in the
    text or beside it.
    Example: ("assistant", "Hi", "", ()) for {"role": "assistant", "content": " Hi\\n"}.
    """
    text, thinking = message["content"], message.get("reasoning_content", "")
    if message["role"] == "assistant":
        if not thinking:
            thinking, text = split_thinking(text)
        text, thinking = text.strip(), thinking.strip()
    calls = tuple(
        (call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    )
    return message["role"], text, thinking, calls


def check_calls(messages: Sequence[dict[str, Any]], in_order: bool) -> None:
    """Raise Refusal for a call of a tool without a result, and for a result without a call.

    messages: of template_messages. in_order: the results must follow the calls at once.
    """
    waiting = Counter[str]()  # ids of calls without a result
    for message in messages:
        if message["role"] == "tool":
            call = message.get("tool_call_id", "")
            if not waiting[call]:
                raise Refusal(
                    400, f"messages: there is a result of a tool, but no call before it: {call[:40]!r}"
                )
            waiting[call] -= 1
        elif in_order:
            _check_answered(waiting)
        waiting.update(call["id"] for call in message.get("tool_calls", ()))
    _check_answered(waiting)


def _check_answered(waiting: Counter[str]) -> None:
    if (left := next(waiting.elements(), None)) is not None:
        raise Refusal(400, f"messages: a call of a tool has no result, which must follow it: {left[:40]!r}")


def split_thinking(text: str) -> tuple[str, str]:
    """Return (thinking, the rest) of what a model writes; no thinking if none is complete.

    Some templates write the opening themselves, so the model does not.
    Example: ("long", "Hi") for "<think>\\nlong\\n</think>\\n\\nHi".
    """
    thinking, closing, rest = text.partition("</think>")
    if not closing:
        return "", text
    return thinking.strip().removeprefix("<think>").strip(), rest.strip()


def _template_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refusal(400, f"{where}: must be an object with a role of {', '.join(sorted(ROLES))}")
    # OpenAI's new name of the system role; many templates would leave out its messages
    role = "system" if message["role"] == "developer" else message["role"]
    content = "" if message.get("content") is None else message["content"]
    out = {"role": role, "content": texts(f"{where}.content", content, role=role)}
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_call(f"{where}.tool_calls", call) for call in listed(where, calls)]
    for name in ("tool_call_id", "name"):
        if isinstance(value := message.get(name), str):
            out[name] = value
    # vLLM's record of a request has renamed reasoning_content, which is what templates read
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return out | ({"reasoning_content": reasoning} if reasoning and isinstance(reasoning, str) else {})


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, f"{where}: must be calls of functions")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            loaded = json.loads(arguments)
            json.dumps(loaded, ensure_ascii=False).encode()  # not half a surrogate pair ("\ud83d")
            arguments = loaded
        except (ValueError, RecursionError):  # the policy wrote it: it stays as it is
            pass
    named = {"name": function["name"], "arguments": arguments}
    return {"type": "function", "id": str(call.get("id", "")), "function": named}


def _canonical(arguments: Any) -> str:
    """Return the arguments with sorted keys, and 1.0 as 1, as clients in JavaScript write it."""
    return json.dumps(json.loads(json.dumps(arguments), parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number
