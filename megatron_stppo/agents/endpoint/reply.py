"""The completion that a client gets, and its forms: an object, or a stream of chunks.

The engine returns whole turns. A stream therefore begins when the turn is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionLogProbs,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo


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
    prompt_ids: tuple[int, ...]  # if the client asked for token ids
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]  # the text of each token, if the client asked for log-probs
    logprobs: tuple[float, ...]

    @property
    def usage(self) -> UsageInfo:
        prompt, completion = self.prompt_tokens, len(self.token_ids)
        return UsageInfo(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


@dataclass(frozen=True)
class Form:
    """The parts of a reply that a client has requested."""

    model: str
    logprobs: bool
    token_ids: bool
    usage: bool = True  # in a stream


def chat_object(reply: Reply, form: Form) -> BaseModel:
    """Return the answer to a chat request as one object."""
    calls = [
        ToolCall(id=call, function=FunctionCall(name=name, arguments=arguments))
        for call, name, arguments in reply.calls
    ]
    # OpenAI's content of a message that only calls tools is null
    message = ChatMessage(role="assistant", content=reply.text if reply.text or not calls else None)
    message.tool_calls = calls
    choice = ChatCompletionResponseChoice(
        index=0,
        message=message,
        logprobs=_chat_logprobs(reply) if form.logprobs else None,
        finish_reason=reply.finish_reason,
        stop_reason=reply.stop_reason,
        token_ids=list(reply.token_ids) if form.token_ids else None,
    )
    return ChatCompletionResponse(
        model=form.model,
        choices=[choice],
        usage=reply.usage,
        prompt_token_ids=list(reply.prompt_ids) if form.token_ids else None,
    )


def chat_chunks(reply: Reply, form: Form) -> Iterator[BaseModel]:
    """Yield the answer to a chat request as a stream of chunks."""
    deltas = [DeltaMessage(role="assistant", content="")]
    deltas += [DeltaMessage(content=reply.text)] if reply.text else []
    deltas += [
        DeltaMessage(
            tool_calls=[
                DeltaToolCall(
                    index=index,
                    id=call,
                    type="function",
                    function=DeltaFunctionCall(name=name, arguments=arguments),
                )
            ]
        )
        for index, (call, name, arguments) in enumerate(reply.calls)
    ]
    first = ChatCompletionStreamResponse(model=form.model, choices=[])
    for number, delta in enumerate(deltas):
        begins = number == 1 or len(deltas) == 1  # the chunk with the tokens
        choice = ChatCompletionResponseStreamChoice(
            index=0,
            delta=delta,
            logprobs=_chat_logprobs(reply) if form.logprobs and begins else None,
            token_ids=list(reply.token_ids) if form.token_ids and begins else None,
        )
        prompt = list(reply.prompt_ids) if form.token_ids and number == 0 else None
        yield first.model_copy(update={"choices": [choice], "prompt_token_ids": prompt})
    last = ChatCompletionResponseStreamChoice(
        index=0, delta=DeltaMessage(), finish_reason=reply.finish_reason, stop_reason=reply.stop_reason
    )
    yield first.model_copy(update={"choices": [last]})
    if form.usage:
        yield first.model_copy(update={"usage": reply.usage})


def text_object(reply: Reply, form: Form) -> BaseModel:
    """Return the answer to a text request as one object."""
    choice = CompletionResponseChoice(**_text_choice(reply, form))
    return CompletionResponse(model=form.model, choices=[choice], usage=reply.usage)


def text_chunks(reply: Reply, form: Form) -> Iterator[BaseModel]:
    """Yield the answer to a text request as a stream of chunks."""
    choice = CompletionResponseStreamChoice(**_text_choice(reply, form))
    first = CompletionStreamResponse(model=form.model, choices=[choice])
    yield first
    if form.usage:
        yield first.model_copy(update={"choices": [], "usage": reply.usage})


def _text_choice(reply: Reply, form: Form) -> dict[str, Any]:
    """Return the fields that the choice of an object and that of a chunk have in common."""
    return {
        "index": 0,
        "text": reply.text,
        "logprobs": _text_logprobs(reply) if form.logprobs else None,
        "finish_reason": reply.finish_reason,
        "stop_reason": reply.stop_reason,
        "token_ids": list(reply.token_ids) if form.token_ids else None,
        "prompt_token_ids": list(reply.prompt_ids) if form.token_ids else None,
    }


def _chat_logprobs(reply: Reply) -> ChatCompletionLogProbs:
    return ChatCompletionLogProbs(
        content=[
            ChatCompletionLogProbsContent(token=piece, logprob=logprob, bytes=list(piece.encode()))
            for piece, logprob in zip(reply.pieces, reply.logprobs, strict=True)
        ]
    )


def _text_logprobs(reply: Reply) -> CompletionLogProbs:
    offsets, length = [], 0
    for piece in reply.pieces:
        offsets.append(length)
        length += len(piece)
    return CompletionLogProbs(
        text_offset=offsets,
        token_logprobs=list(reply.logprobs),
        tokens=list(reply.pieces),
        top_logprobs=[{piece: logprob} for piece, logprob in zip(reply.pieces, reply.logprobs, strict=True)],
    )
