"""Reads scripted trajectories for the cold start, as the tokens that the same episode has in a rollout.

A row: {"prompt": [{"role", "content"}], "segments": [{"text", "kind": "turn" | "observation"}], "stage"}.
The prompt is rendered with the chat template. Every segment is encoded separately, with special tokens as
text, like observations in the rollout. The cold start trains language modelling on all of these tokens; those
that the model itself writes in an episode (the turns) can have a larger weight than the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from megatron_stppo.config import ConfigError
from megatron_stppo.data import jsonl
from megatron_stppo.data.chat import encode_chats
from megatron_stppo.types import Message

CHUNK = 1024  # rows encoded together


class ChatMessage(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


class Segment(BaseModel):
    text: str
    kind: Literal["turn", "observation"]


class Row(BaseModel):
    prompt: list[ChatMessage] = Field(min_length=1)
    segments: list[Segment] = Field(min_length=1)
    stage: str = ""


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


def read(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Demonstration]:
    """Return the demonstration of each row, in the order of the file, up to a total of `max_tokens` tokens.

    Reading stops before the first row that would exceed the total. Raises ConfigError, whose message names
    file, row (from 1), field and remedy.
    """
    scripts: list[Demonstration] = []
    left = max_tokens
    rows = _rows(path)
    while chunk := list(islice(rows, CHUNK)):
        for script in encode(chunk, tokenizer):
            if len(script) > left:
                return _nonempty(scripts, path, max_tokens)
            left -= len(script)
            scripts.append(script)
    return _nonempty(scripts, path, max_tokens)


def _nonempty(scripts: list[Demonstration], path: Path, max_tokens: int) -> list[Demonstration]:
    if not scripts:
        raise ConfigError(
            f"data.demonstrations={path}: no row fits in cold_start.tokens={max_tokens}; "
            "give a file with rows, or more tokens"
        )
    return scripts


def _rows(path: Path) -> Iterator[Row]:
    for where, row in jsonl.rows(path, "data.demonstrations"):
        yield _row(row, f"data.demonstrations={where}")


def _row(row: Any, where: str) -> Row:
    try:
        return Row.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "row"
        raise ConfigError(
            f"{where}: {field}: {first['msg']}; give prompt, segments (text, kind turn|observation) and stage"
        ) from None


def encode(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
    """Return the demonstration of each row: its prompt, then its segments."""
    prompts = [[Message(message.role, message.content) for message in row.prompt] for row in rows]
    heads = encode_chats(tokenizer, prompts)
    texts = [segment.text for row in rows for segment in row.segments]
    pieces: Iterator[Any] = iter(
        tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    )
    return [
        _join(head, [(next(pieces), s.kind) for s in row.segments])
        for head, row in zip(heads, rows, strict=True)
    ]


def _join(head: Sequence[int], segments: Sequence[tuple[Sequence[int], str]]) -> Demonstration:
    token_ids, written = list(head), [False] * len(head)
    for ids, kind in segments:
        token_ids += ids
        written += [kind == "turn"] * len(ids)
    return Demonstration(tuple(token_ids), tuple(written))
