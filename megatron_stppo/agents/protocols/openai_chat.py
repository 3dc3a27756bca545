"""OpenAI's APIs for chats and for texts: what a request asks for, and a reply as an object, or in chunks.

Sampling is the run's: a client cannot change it. Each field of a request is accepted (it has the meaning of
the OpenAI API, within the limits of the run), ignored (any value, without effect) or refused with status 400.
A field that is null or has its default value is never refused. docs/agents.md has the table for users.

The engine returns whole turns. A stream therefore begins when the turn is complete. The objects are those of
OpenAI's API, with vLLM's additions stop_reason, token_ids and prompt_token_ids.
"""

import hashlib
import itertools
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jsonschema import Draft202012Validator, SchemaError
from pydantic import ValidationError
from referencing import Registry
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from megatron_stppo.agents.protocols.body import Refusal, fields, listed
from megatron_stppo.agents.protocols.exchange import (
    Ask,
    Json,
    Reply,
    check_calls,
    compared,
    template_messages,
)

BOTH = frozenset(
    "max_tokens stop include_stop_str_in_output stream stream_options logprobs return_token_ids".split()
)
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
# by field, the values that change nothing: vLLM's default and OpenAI's
_DEFAULTS = {
    kind: {name: [value] for name, value in DEFAULTS.items()}
    | {
        name: [f.get_default(call_default_factory=False), *([DEFAULTS[name]] if name in DEFAULTS else [])]
        for name, f in protocol.model_fields.items()
    }
    for kind, protocol in (("chat", ChatCompletionRequest), ("text", CompletionRequest))
}
Protocol = TypeVar("Protocol", ChatCompletionRequest, CompletionRequest)
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MOST_TOKENS = 2**31 - 1  # used for any larger max_tokens, which ranks could not exchange


def chat_ask(body: Mapping[str, Any], has_parser: bool, in_order: bool = True) -> Ask:
    """Return what POST /v1/chat/completions asks for. Raises Refusal.

    has_parser: whether the run can parse calls of tools. in_order: see check_calls.
    """
    given = fields(body, ACCEPTED["chat"], IGNORED, _DEFAULTS["chat"])
    request = _validated(ChatCompletionRequest, given)
    messages = template_messages(given.get("messages") or ())
    check_calls(messages, in_order)
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    strict = dict(_strict(tools))
    if tools and not has_parser:
        raise Refusal(400, "tools: environment.tool_parser is not set; name vLLM's parser for the model")
    calls_tools = tools and tool_choice(given.get("tool_choice")) != "none"
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


def text_ask(body: Mapping[str, Any], has_parser: bool = False) -> Ask:
    """Return what POST /v1/completions asks for. Raises Refusal.

    A list of token ids is taken as it is. In a text, special tokens are text.
    """
    given = fields(body, ACCEPTED["text"], IGNORED, _DEFAULTS["text"])
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    is_text = isinstance(prompt, str)
    if not prompt or not (is_text or (isinstance(prompt, list) and all(type(i) is int for i in prompt))):
        raise Refusal(400, "prompt: must be one text or one list of token ids, and not empty")
    request = _validated(CompletionRequest, given | {"prompt": "a"})  # the real prompt is checked above
    if request.logprobs not in (None, 0, 1):
        raise Refusal(400, "logprobs: only those of the sampled tokens are known; give 0 or 1")
    return Ask(
        kind="text" if is_text else "ids",
        units=prompt if is_text else tuple(prompt),
        api="text",
        logprobs=request.logprobs is not None,
        **_common(given, request),
    )


def tool_choice(choice: Any) -> str | None:
    """Return a choice that does not change the sampling. Raises Refusal for others."""
    if choice not in (None, "auto", "none"):
        raise Refusal(400, "tool_choice: only auto and none are supported, which do not change the sampling")
    chosen: str | None = choice
    return chosen


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
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in every):
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


def _validated(protocol: type[Protocol], given: Mapping[str, Any]) -> Protocol:
    """Return vLLM's record of the request. Raises Refusal with its first error."""
    try:
        return protocol.model_validate({name: value for name, value in given.items() if name != "stop"})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3])
        raise Refusal(400, f"{where}: {first['msg']}") from None
    except (VLLMValidationError, ValueError, TypeError) as error:  # of vLLM's own validators
        raise Refusal(400, str(error)) from None


def chat_object(reply: Reply, model: str, ask: Ask) -> Json:
    """Return the answer to a chat request as one object."""
    # OpenAI's content of a message that only calls tools is null
    content = reply.text if reply.text or not reply.calls else None
    message = {"role": "assistant", "content": content, "tool_calls": reply.tool_calls}
    choice = {"index": 0, "message": message} | _end(reply) | _tokens(reply, _chat_logprobs(reply))
    return _object("chat.completion", model, choice) | _prompt(reply) | _usage(reply)


def chat_events(reply: Reply, model: str, ask: Ask) -> Iterator[str]:
    """Yield the answer to a chat request as a stream of chunks."""
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": reply.text}] if reply.text else []
    deltas += [{"tool_calls": [{"index": index} | call]} for index, call in enumerate(reply.tool_calls)]
    choices: list[Json] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices[min(1, len(deltas) - 1)] |= _tokens(reply, _chat_logprobs(reply))
    choices.append({"index": 0, "delta": {}} | _end(reply))
    chunk = _object("chat.completion.chunk", model)
    for number, choice in enumerate(choices):
        yield _data(chunk | {"choices": [choice]} | (_prompt(reply) if number == 0 else {}))
    yield from _last(chunk | _usage(reply), ask)


def text_object(reply: Reply, model: str, ask: Ask) -> Json:
    """Return the answer to a text request as one object."""
    choice = {"index": 0, "text": reply.text} | _end(reply) | _tokens(reply, _text_logprobs(reply))
    return _object("text_completion", model, choice | _prompt(reply)) | _usage(reply)


def text_events(reply: Reply, model: str, ask: Ask) -> Iterator[str]:
    """Yield the answer to a text request as a stream of chunks."""
    whole = text_object(reply, model, ask)
    yield _data(whole | {"usage": None})
    yield from _last(whole | {"choices": []}, ask)


def _last(usage: Json, ask: Ask) -> Iterator[str]:
    if ask.usage_in_stream:
        yield _data(usage)
    yield "data: [DONE]\n\n"


def _data(chunk: Json) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _object(kind: str, model: str, *choices: Json) -> Json:
    name, created = f"cmpl-{secrets.token_hex(16)}", int(time.time())
    return {"id": name, "object": kind, "created": created, "model": model, "choices": list(choices)}


def _usage(reply: Reply) -> Json:
    prompt, completion = reply.prompt_tokens, len(reply.token_ids)
    total = prompt + completion
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}}


def _end(reply: Reply) -> Json:
    return {"finish_reason": reply.finish_reason, "stop_reason": reply.stop_reason}


def _prompt(reply: Reply) -> Json:
    return {"prompt_token_ids": reply.prompt_ids or None}


def _tokens(reply: Reply, logprobs: Json | None) -> Json:
    return {"logprobs": logprobs, "token_ids": reply.token_ids if reply.prompt_ids else None}


def _chat_logprobs(reply: Reply) -> Json | None:
    if not reply.pieces:
        return None
    return {
        "content": [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in zip(reply.pieces, reply.logprobs, strict=True)
        ]
    }


def _text_logprobs(reply: Reply) -> Json | None:
    if not reply.pieces:
        return None
    lengths = [len(piece) for piece in reply.pieces]
    return {
        "text_offset": list(itertools.accumulate(lengths, initial=0))[:-1],
        "token_logprobs": reply.logprobs,
        "tokens": reply.pieces,
        "top_logprobs": [{piece: n} for piece, n in zip(reply.pieces, reply.logprobs, strict=True)],
    }
