"""Encodes a chat as token ids. Special tokens of the template are control tokens; in a message they are text.

Otherwise "<|im_end|>" in a task or in an environment's message would end the message, and the text after it
could imitate a message of another role.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from megatron_stppo.config import ConfigError
from megatron_stppo.types import Message

# Private-use characters, which messages should not contain. They enclose the marks that temporarily replace
# special tokens in messages.
OPEN, CLOSE = "\ue000", "\ue001"


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of untrusted text. "<|im_end|>" in it becomes text, never a control token."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids


def encode_chats(tokenizer: Any, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
    """Return the token ids of each chat, rendered by the chat template with the assistant's opening.

    The result equals tokenizer.apply_chat_template, unless a message contains the text of a special token.
    This text, and the text around it up to the template's next special tokens, is encoded by encode_plain.
    Raises ConfigError for messages that the template rejects.
    """
    special, may_normalise = _special_tokens(tokenizer)
    rendered, marks = [], []
    for messages in chats:
        marked, texts = _mark(messages, special)
        if may_normalise:
            marked = _mark_whole(tokenizer, messages, marked, texts, special)
        rendered.append(_render(tokenizer, marked))
        marks.append(texts)
    every: list[list[int]] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return [
        _encode_marked(tokenizer, text, texts, special) if texts else ids
        for text, texts, ids in zip(rendered, marks, every, strict=True)
    ]


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of one chat; see encode_chats."""
    return encode_chats(tokenizer, [messages])[0]


@functools.lru_cache(maxsize=2)
def _special_tokens(tokenizer: Any) -> tuple[dict[str, int], bool]:
    """Return {text: id} of the control tokens, and whether the tokenizer matches any of them in normalised
    text. Added tokens that are not special, such as <tool_call>, are text."""
    special = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    normalised = any(token.normalized for token in special.values())
    return {str(token): number for number, token in special.items()}, normalised


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"model.path: its chat template rejects messages with the roles {roles} ({error}); change "
            "the prompt or the template"
        ) from None
    return text


def _mark(
    messages: Sequence[Message], special: dict[str, int]
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Replace the text of each special token in the messages by a mark; also return {mark: that text}.

    The rest of a message is not changed, because the template may strip it or check its prefix.
    """
    texts: dict[str, str] = {}
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
    opening = _opening(messages)
    marked = [
        {
            "role": message.role,
            "content": pattern.sub(lambda found: _new(opening, found.group(), texts), message.content),
        }
        for message in messages
    ]
    return marked, texts


def _mark_whole(
    tokenizer: Any,
    messages: Sequence[Message],
    marked: list[dict[str, str]],
    texts: dict[str, str],
    special: dict[str, int],
) -> list[dict[str, str]]:
    """Replace the whole content of each message that contains a special token after the tokenizer normalises
    it by a mark."""
    opening, out = _opening(messages), []
    for message, given in zip(messages, marked, strict=True):
        encoded = tokenizer(given["content"], add_special_tokens=False)["input_ids"]
        held = not set(special.values()).isdisjoint(encoded)
        out.append(given | {"content": _new(opening, message.content, texts)} if held else given)
    return out


def _opening(messages: Sequence[Message]) -> str:
    """Return a string that no message contains, to begin the marks with."""
    given, opening = "".join(message.content for message in messages), OPEN
    while opening in given:
        opening += OPEN
    return opening


def _new(opening: str, text: str, texts: dict[str, str]) -> str:
    mark = f"{opening}{len(texts)}{CLOSE}"
    texts[mark] = text
    return mark


def _spans(encoded: Any, text: str, special: dict[str, int]) -> list[tuple[int, int, int]]:
    """Return (index of the token, start, end) of the special tokens that are written in the text.

    A special id alone is not enough, because an unknown word may have one too.
    """
    ids, offsets, numbers = encoded["input_ids"], encoded["offset_mapping"], set(special.values())
    return [
        (index, start, end)
        for index, (number, (start, end)) in enumerate(zip(ids, offsets, strict=True))
        if number in numbers and special.get(text[start:end].strip()) == number
    ]


def _encode_marked(tokenizer: Any, text: str, texts: dict[str, str], special: dict[str, int]) -> list[int]:
    """Return the token ids of a rendered chat with marks.

    A piece between two special tokens of the template keeps its ids if it contains no mark. Otherwise its
    marks are replaced by their texts, and the piece is encoded by encode_plain.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    out: list[int] = []
    after, begin = 0, 0  # indices of the token and of the character after the last special token
    for index, start, end in [*_spans(encoded, text, special), (len(ids), len(text), len(text))]:
        piece = text[begin:start]
        if any(mark in piece for mark in texts):
            for mark, original in texts.items():
                piece = piece.replace(mark, original)
            out += encode_plain(tokenizer, piece)
        else:
            out += ids[after:index]
        out += ids[index : index + 1]
        after, begin = index + 1, end
    return out
