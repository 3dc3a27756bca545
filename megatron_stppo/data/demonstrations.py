"""Reads scripted trajectories for the cold start, as the tokens that the same episode has in a rollout.

A row of an environment: {"prompt": [{"role", "content"}], "segments": [{"text", "kind"}], "stage"}, where
kind is "turn" or "observation". The prompt is rendered with the chat template. Every segment is encoded
separately, with special tokens as text, like observations in the rollout.

A row of an agent: {"messages": [{"role", "content"}], "tools": [..], "stage"}. The content of an assistant is
what the model writes, with its calls of tools as text. Everything else is what the endpoint reads: the
messages before the first completion and those after each, rendered with the chat template.

The cold start trains language modelling on all of these tokens; those that the model itself writes in an
episode (the turns) can have a larger weight than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from megatron_stppo.base.types import Message
from megatron_stppo.config import ConfigError
from megatron_stppo.data.text.chat import encode_chats
from megatron_stppo.data.text.conversation import encode_after, encode_conversation
from megatron_stppo.data.text.plain_text import encode_plain
from megatron_stppo.data.values import jsonl_rows

CHUNK = 1024  # rows encoded together


class Strict(BaseModel):
    """A record that refuses unknown keys: they would be ignored, such as the calls in `tool_calls`."""

    model_config = ConfigDict(extra="forbid")


class ChatMessage(BaseModel):
    """A message of a prompt, as in the data of a run. All its keys reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str


class Segment(Strict):
    text: str
    kind: Literal["turn", "observation"]


class Row(Strict):
    prompt: list[ChatMessage] = Field(min_length=1)
    segments: list[Segment] = Field(min_length=1)
    stage: str = ""


class AgentMessage(Strict):
    """A message of an agent's request. The model's calls of tools are a part of its content, as text.

    tool_call_id, name: as clients send them with the result of a tool; the chat template may use them.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AgentMessage:
        if self.role == "assistant" and not self.content:
            raise ValueError(
                "the content of an assistant must be what the model writes, with its calls of tools"
            )
        return self


class AgentRow(Strict):
    """The episode of an agent with one conversation."""

    messages: list[AgentMessage]
    tools: list[dict[str, Any]] = []
    stage: str = ""

    @model_validator(mode="after")
    def _ends_with_the_model(self) -> AgentRow:
        roles = [message.role for message in self.messages]
        if len(roles) < 2 or roles[0] == "assistant" or roles[-1] != "assistant":
            raise ValueError("messages must begin with another role than assistant, and end with assistant")
        return self


@dataclass(frozen=True)
class Demonstration:
    """The tokens of one scripted episode.

    Example: the prompt [7, 8], the turn [3] and the observation [9] are
    Demonstration(token_ids=(7, 8, 3, 9), written=(False, False, True, False)).
    """

    token_ids: tuple[int, ...]
    written: tuple[bool, ...]  # per token: is it part of a turn, which the model writes in an episode?

    def __len__(self) -> int:
        return len(self.token_ids)


def read(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    unended: Callable[[str], str] = lambda turn: "",
) -> list[Demonstration]:
    """Return the demonstration of each row, in the order of the file, up to a total of `max_tokens` tokens.

    Reading stops before the first row that would exceed the total. unended: returns why the text of a turn
    does not end as in an episode of the environment, or "". The turns of an agent's row end with the
    end-of-text token. Raises ConfigError, whose message names file, row (from 1), field and remedy.
    """
    scripts: list[Demonstration] = []
    left, rows = max_tokens, _rows(path)
    while left >= 0 and (chunk := list(islice(rows, CHUNK))):
        for (where, row), script in zip(chunk, encode([row for _, row in chunk], tokenizer), strict=True):
            left -= len(script)
            if left < 0:
                break
            for place, segment in enumerate(row.segments if isinstance(row, Row) else ()):
                if segment.kind == "turn" and (why := unended(segment.text)):
                    raise ConfigError(f"data.demonstrations={where}: segments.{place}.text: {why}")
            scripts.append(script)
    if not scripts:
        raise ConfigError(
            f"data.demonstrations={path}: no row fits in cold_start.tokens={max_tokens}; "
            "give a file with rows, or more tokens"
        )
    return scripts


def _rows(path: Path) -> Iterator[tuple[str, Row | AgentRow]]:
    for where, row in jsonl_rows(path, "data.demonstrations"):
        try:
            yield where, validated(row)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "row"
            raise ConfigError(
                f"data.demonstrations={where}: {field}: {first['msg']}; give prompt, segments (text, kind "
                "turn|observation) and stage, or messages, tools and stage"
            ) from None


def validated(row: Any) -> Row | AgentRow:
    """Return the record of a row; one with `messages` is an agent's. Raises ValidationError."""
    is_agents = isinstance(row, dict) and "messages" in row
    return (AgentRow if is_agents else Row).model_validate(row)


def encode(rows: Sequence[Row | AgentRow], tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
    """Return the demonstration of each row."""
    of_environments = iter(_segmented([row for row in rows if isinstance(row, Row)], tokenizer))
    return [next(of_environments) if isinstance(row, Row) else _conversation(row, tokenizer) for row in rows]


def _conversation(row: AgentRow, tokenizer: PreTrainedTokenizerBase) -> Demonstration:
    """Return the messages up to the first completion, then each completion and what follows it."""
    messages = [message.model_dump(exclude_none=True) for message in row.messages]
    end = tokenizer.eos_token_id
    completions = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    pieces: list[tuple[list[int], str]] = []
    for place, following in zip(completions, [*completions[1:], None], strict=True):
        pieces.append(([*encode_plain(tokenizer, messages[place]["content"]), end], "turn"))
        if following is not None:
            read = encode_after(tokenizer, messages[:following], row.tools, place, end, [end])
            pieces.append((read, "observation"))
    return _join(encode_conversation(tokenizer, messages[: completions[0]], row.tools), pieces)


def _segmented(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
    """Return for each row its prompt, then its segments."""
    if not rows:
        return []
    prompts = [[Message.of(message.model_dump()) for message in row.prompt] for row in rows]
    heads = encode_chats(tokenizer, prompts)
    return [
        _join(head, [(encode_plain(tokenizer, s.text), s.kind) for s in row.segments])
        for head, row in zip(heads, rows, strict=True)
    ]


def _join(head: Sequence[int], segments: Sequence[tuple[Sequence[int], str]]) -> Demonstration:
    token_ids, written = list(head), [False] * len(head)
    for ids, kind in segments:
        token_ids += ids
        written += [kind == "turn"] * len(ids)
    return Demonstration(tuple(token_ids), tuple(written))
