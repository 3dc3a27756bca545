"""What a request asks for, from the JSON of its body. Sampling is the run's: a client cannot change it.

Each field of a request is accepted (it has the meaning of the OpenAI API, within the limits of the run),
ignored (any value, without effect) or refused with status 400. A field that is null or has its default value
is never refused. docs/agents.md has the table for users.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from pydantic import BaseModel, ValidationError
from referencing import Registry
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from megatron_stppo.agents.protocols.body import Refusal, fields, listed
from megatron_stppo.agents.protocols.chat_messages import check_calls, compared, template_messages
from megatron_stppo.agents.protocols.reply import Reply

BOTH = {
    "max_tokens",
    "stop",
    "include_stop_str_in_output",
    "stream",
    "stream_options",
    "logprobs",
    "return_token_ids",
}
ACCEPTED = {
    "chat": BOTH | {"messages", "tools", "tool_choice", "max_completion_tokens"},
    "text": BOTH | {"prompt"},
}
# Default values of the OpenAI API that differ from vLLM's, which are null, or that vLLM does not have.
DEFAULTS = {"n": 1, "best_of": 1, "response_format": {"type": "text"}, "modalities": ["text"]}
IGNORED = frozenset(
    # sampling: that of the run is used
    "temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty length_penalty "
    # amount of reasoning, which training determines
    "reasoning_effort verbosity include_reasoning parallel_tool_calls "
    # the name of the model, and notes of the client
    "model user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "request_id session_id priority cache_salt "
    # form of the text: special tokens that the policy writes are text
    "skip_special_tokens spaces_between_special_tokens stream_interval".split()
)
_PROTOCOLS: dict[str, type[BaseModel]] = {"chat": ChatCompletionRequest, "text": CompletionRequest}
# by field, the values that change nothing: vLLM's default and OpenAI's
_DEFAULTS = {
    kind: {name: [value] for name, value in DEFAULTS.items()}
    | {
        name: [f.get_default(call_default_factory=False), *([DEFAULTS[name]] if name in DEFAULTS else [])]
        for name, f in protocol.model_fields.items()
    }
    for kind, protocol in _PROTOCOLS.items()
}
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MOST_TOKENS = 2**31 - 1  # used for any larger max_tokens, which ranks could not exchange


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
    strict: dict[str, Draft202012Validator] = field(
        default_factory=dict
    )  # of a tool's arguments, by its name
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


def chat_ask(body: Mapping[str, Any], has_parser: bool, in_order: bool = True) -> Ask:
    """Return what POST /v1/chat/completions asks for. Raises Refusal.

    has_parser: whether the run can parse calls of tools. in_order: see check_calls.
    """
    given = _accepted("chat", body)
    request = _validated(ChatCompletionRequest, given)
    assert isinstance(request, ChatCompletionRequest)
    messages = template_messages(given.get("messages") or ())
    check_calls(messages, in_order)
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    strict = dict(_strict(tools))
    if tools and not has_parser:
        raise Refusal(400, "tools: environment.tool_parser is not set; name vLLM's parser for the model")
    if given.get("tool_choice") not in (None, "auto", "none"):
        raise Refusal(400, "tool_choice: only auto and none are supported, which do not change the sampling")
    calls_tools = tools and given.get("tool_choice") != "none"
    return Ask(
        kind=("chat", json.dumps(tools, sort_keys=True)),
        units=tuple(map(compared, messages)),
        api="chat",
        messages=messages,
        tools=tools,
        logprobs=bool(request.logprobs),
        request=request.model_copy(update={"tool_choice": "auto"}) if calls_tools else None,
        strict=strict,
        **_common(given, request),
    )


def text_ask(body: Mapping[str, Any]) -> Ask:
    """Return what POST /v1/completions asks for. Raises Refusal.

    A list of token ids is taken as it is. In a text, special tokens are text.
    """
    given = _accepted("text", body)
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    is_text = isinstance(prompt, str)
    if not prompt or not (is_text or (isinstance(prompt, list) and all(type(i) is int for i in prompt))):
        raise Refusal(400, "prompt: must be one text or one list of token ids, and not empty")
    request = _validated(CompletionRequest, given | {"prompt": "a"})  # the real prompt is checked above
    assert isinstance(request, CompletionRequest)
    if request.logprobs not in (None, 0, 1):
        raise Refusal(400, "logprobs: only those of the sampled tokens are known; give 0 or 1")
    return Ask(
        kind="text" if is_text else "ids",
        units=prompt if is_text else tuple(prompt),
        api="text",
        logprobs=request.logprobs is not None,
        **_common(given, request),
    )


def _accepted(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return fields(body, ACCEPTED[kind], IGNORED, _DEFAULTS[kind])


def _common(given: Mapping[str, Any], request: ChatCompletionRequest | CompletionRequest) -> dict[str, Any]:
    """Return the fields of an Ask that chats and texts share.

    A client may write 16 as 16.0 or "16": the numbers of `request` are integers. It also has defaults of
    vLLM, such as max_tokens=16, which are not used.
    """
    limits = {
        name: vars(request)[name]
        for name in ("max_tokens", "max_completion_tokens")
        if given.get(name) is not None
    }
    for name, value in limits.items():
        if value < 1:
            raise Refusal(400, f"{name}: must be at least 1")
    return {
        "max_tokens": min(MOST_TOKENS, *limits.values()) if limits else None,
        "stop": _stops(given.get("stop", [])),
        "keep_stop": bool(request.include_stop_str_in_output),
        "stream": bool(request.stream),
        "usage_in_stream": bool(request.stream_options and request.stream_options.include_usage),
        "token_ids": bool(request.return_token_ids),
        "digest": hashlib.blake2b(json.dumps(given, sort_keys=True).encode()).digest(),
    }


def _stops(stop: Any) -> tuple[str, ...]:
    every = listed("stop", [stop] if isinstance(stop, str) else stop)
    if len(every) > MAX_STOPS:
        raise Refusal(400, f"stop: has {len(every)} texts; the endpoint takes at most {MAX_STOPS}")
    if not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_LENGTH for one in every):
        raise Refusal(400, f"stop: must be texts of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(every)


def translated(
    chat: Mapping[str, Any], has_parser: bool, names: Mapping[str, str], in_order: bool = True
) -> Ask:
    """Return chat_ask of the request of another API. Fields that are null or empty are left out.

    names: {field of the chat: its name in the other API}, for Refusal.
    """
    try:
        kept = {name: v for name, v in chat.items() if name == "messages" or (v is not None and v != [])}
        return chat_ask(kept, has_parser, in_order)
    except Refusal as refusal:
        name = re.match(r"\w*", str(refusal))[0]  # type: ignore[index]
        said = names.get(name, name) + str(refusal).removeprefix(name)
        raise Refusal(refusal.status, said, refusal.code) from None


def _strict(tools: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Draft202012Validator]]:
    """Yield (name, what checks its arguments) for each strict tool. Removes the field, which no policy reads.

    Nothing is fetched that a schema refers to.
    """
    for place, tool in enumerate(tools):
        function = tool["function"]
        if function.pop("strict", False):
            schema = function.get("parameters") or {}
            try:
                Draft202012Validator.check_schema(schema)
            except SchemaError as error:
                said = f"tools[{place}]: its parameters are no JSON schema ({error.message[:80]})"
                raise Refusal(400, said) from None
            yield function["name"], Draft202012Validator(schema, registry=Registry())


def _validated(protocol: type[BaseModel], given: Mapping[str, Any]) -> BaseModel:
    """Return vLLM's record of the request. Raises Refusal with its first error."""
    try:
        return protocol.model_validate({name: value for name, value in given.items() if name != "stop"})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3])
        raise Refusal(400, f"{where}: {first['msg']}") from None
    except (VLLMValidationError, ValueError, TypeError) as error:  # of vLLM's own validators
        raise Refusal(400, str(error)) from None
