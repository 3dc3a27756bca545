"""Reads scripted trajectories for the cold start, as the tokens that the same episode has in a rollout.

A row: {"prompt": [{"role", "content"}], "segments": [{"text", "kind": "turn" | "observation"}], "stage"}.
The prompt is rendered with the chat template. Every segment is encoded separately, with special tokens as
text, like observations in the rollout. The cold start trains language modelling on all of these tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def read(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[tuple[int, ...]]:
    """Return the token ids of each row, in the order of the file, up to a total of `max_tokens` tokens.

    Reading stops before the first row that would exceed the total. Raises ConfigError, whose message names
    file, row (from 1), field and remedy.
    """
    sequences: list[tuple[int, ...]] = []
    left = max_tokens
    rows = _rows(path)
    while chunk := list(islice(rows, CHUNK)):
        for ids in encode(chunk, tokenizer):
            if len(ids) > left:
                return _nonempty(sequences, path, max_tokens)
            left -= len(ids)
            sequences.append(ids)
    return _nonempty(sequences, path, max_tokens)


def _nonempty(sequences: list[tuple[int, ...]], path: Path, max_tokens: int) -> list[tuple[int, ...]]:
    if not sequences:
        raise ConfigError(
            f"data.demonstrations={path}: no row fits in cold_start.tokens={max_tokens}; "
            "give a file with rows, or more tokens"
        )
    return sequences


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


def encode(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Return the token ids of each row: its prompt, then its segments."""
    prompts = [[Message(message.role, message.content) for message in row.prompt] for row in rows]
    heads = encode_chats(tokenizer, prompts)
    texts = [segment.text for row in rows for segment in row.segments]
    pieces: Iterator[Any] = iter(
        tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    )
    return [
        tuple(head) + tuple(token for _ in row.segments for token in next(pieces))
        for head, row in zip(heads, rows, strict=True)
    ]
