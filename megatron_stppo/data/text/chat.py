"""Encodes a chat as token ids. Special tokens of the template are control tokens; in a message they are text.

Otherwise "<|im_end|>" in a task or in an environment's message would end the message, and the text after it
could imitate a message of another role.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from megatron_stppo.base.types import Message
from megatron_stppo.config import ConfigError
from megatron_stppo.data.text.plain_text import beginning, encode_plain

# Private-use characters, which messages should not contain. They enclose the marks that temporarily replace
# special tokens in messages.
OPEN, CLOSE = "\ue000", "\ue001"
_OPENING = re.compile(f"{OPEN}([0-9]{{1,8}})(?={OPEN})")  # the last OPEN may begin the next one


def encode_chats(tokenizer: Any, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
    """Return the token ids of each chat, rendered by the chat template with the assistant's opening.

    The result equals tokenizer.apply_chat_template, unless a message contains the text of a special token.
    This text, and the text around it up to the template's next special tokens, is then encoded as text.
    Raises ConfigError for messages that the template rejects, and for calls of tools that it leaves out.
    """
    rendered, marks = [], []
    for messages in chats:
        marked, texts = mark_special(tokenizer, [message.as_dict() for message in messages])
        rendered.append(render_prompt(tokenizer, marked))
        marks.append(texts)
    every: list[list[int]] = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
    return [
        encode_marked(tokenizer, text, texts) if texts else ids
        for text, texts, ids in zip(rendered, marks, every, strict=True)
    ]


def encode_chat(tokenizer: Any, messages: Sequence[Message], most: int | None = None) -> list[int]:
    """Return the token ids of one chat; see encode_chats, and for `most` encode_marked."""
    marked, texts = mark_special(tokenizer, [message.as_dict() for message in messages])
    return encode_marked(tokenizer, render_prompt(tokenizer, marked), texts, most)


@functools.lru_cache(maxsize=4)
def _special_tokens(tokenizer: Any) -> tuple[dict[str, int], bool]:
    """Return {text: id} of the control tokens, and whether the tokenizer matches any of them in normalised
    text. Added tokens that are not special, such as <tool_call>, are text."""
    special = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    normalised = any(token.normalized for token in special.values())
    return {str(token): number for number, token in special.items()}, normalised


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **given: Any) -> str:
    """Return the text of the chat template with the assistant's opening.

    given: further variables of the template, such as tools. Raises ConfigError for messages that it rejects.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, **given
        )
    except Exception as error:  # a template is a program: it may also add a text and a number
        reason = str(error) if type(error) is TemplateError else f"{type(error).__name__}: {error}"
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ConfigError(
            f"model.path: its chat template rejects messages with the roles {roles} ({reason}); "
            "change the prompt or the template"
        ) from None
    return text


def render_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the chat template, as `render` does, for messages that the run itself sends.

    Raises ConfigError also if the template leaves out a call of a tool, or a tool's answer: many templates
    leave out silently what they were not written for.
    """
    text = render(tokenizer, messages)
    if not any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        return text
    opening, marks = unused_opening(messages), dict[str, str]()

    def mark(what: str) -> str:
        new = f"{opening}{len(marks)}{CLOSE}"
        marks[new] = what
        return new

    changed = [_with_marks(message, mark) for message in messages]
    try:
        shown = render(tokenizer, changed)
    except ConfigError:  # so the template reads what was changed
        return text
    if left_out := [what for new, what in marks.items() if new not in shown]:
        raise ConfigError(
            f"model.path: its chat template leaves out {left_out[0]}; give a template that renders them, or "
            "write them into the content of other messages"
        )
    return text


def _with_marks(message: Mapping[str, Any], mark: Callable[[str], str]) -> Mapping[str, Any]:
    """Return the message with a mark as the content of a tool, and as each call of a tool."""
    if message["role"] == "tool":
        return {**message, "content": mark("messages of the role tool")}
    calls = message.get("tool_calls")
    if not calls:
        return message
    every = calls if isinstance(calls, list) else [calls]
    return {**message, "tool_calls": [_marked_call(call, mark("tool_calls")) for call in every]}


def _marked_call(call: Any, mark: str) -> Any:
    """Return a call with the mark as its name and in its arguments: a template may leave out one of them."""
    if not isinstance(call, dict):
        return mark
    if isinstance(call.get("function"), dict):
        return {**call, "function": _marked_call(call["function"], mark)}
    return {
        **call,
        "name": mark,
        "arguments": mark if isinstance(call.get("arguments"), str) else {mark: mark},
    }


def mark_special(tokenizer: Any, value: Any) -> tuple[Any, dict[str, str]]:
    """Replace the text of each special token in all strings of a value (lists, dicts, strings) by a mark.

    Return the value with marks, and {mark: text}. The rest of a string is not changed, because the template
    may strip it or check its prefix. If the tokenizer matches special tokens in normalised text, a string
    that contains one after it is normalised is replaced as a whole.
    """
    special, may_normalise = _special_tokens(tokenizer)
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
    texts: dict[str, str] = {}
    opening = unused_opening(value)

    def marked(text: str) -> str:
        out = pattern.sub(lambda found: _new(opening, found.group(), texts), text)
        if may_normalise:
            encoded = tokenizer(out, add_special_tokens=False)["input_ids"]
            if not set(special.values()).isdisjoint(encoded):
                return _new(opening, text, texts)
        return out

    return _in_strings(value, marked), texts


def unused_opening(value: Any) -> str:
    """Return a string that no string of the value contains, to begin marks with. Example: OPEN "0" OPEN.

    One pass, and a few characters: hostile text may consist of OPEN, and of texts that look like openings.
    """
    used = {found.group(1) for text in _strings(value) for found in _OPENING.finditer(text)}
    return next(f"{OPEN}{n}{OPEN}" for n in itertools.count() if str(n) not in used)


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from (*_strings(key), *_strings(part))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


def _in_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with `change` applied to all its strings, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_in_strings(key, change): _in_strings(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_in_strings(part, change) for part in value]
    return value


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


def encode_marked(tokenizer: Any, text: str, texts: dict[str, str], most: int | None = None) -> list[int]:
    """Return the token ids of a rendered chat with the marks of mark_special.

    A piece between two special tokens of the template keeps its ids if it contains no mark. Otherwise its
    marks are replaced by their texts, and the piece is encoded as text.
    most: more tokens are too many. Of a long text with more, only a beginning is encoded, and `most` + 1 ids
    are returned.
    """
    if most is not None:
        begun = beginning(tokenizer, text, most + 1, lambda same, part: encode_marked(same, part, texts))
        return encode_marked(tokenizer, begun, texts)[: most + 1 if begun != text else None]
    special, _ = _special_tokens(tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    out: list[int] = []
    # Hostile text may have thousands of marks: one pass over the text replaces all of them.
    opening = next(iter(texts), "").removesuffix(CLOSE).rstrip("0123456789")
    marks = re.compile(f"{re.escape(opening)}[0-9]+{CLOSE}")
    after, begin = 0, 0  # indices of the token and of the character after the last special token
    for index, start, end in [*_spans(encoded, text, special), (len(ids), len(text), len(text))]:
        piece = text[begin:start]
        plain, count = (
            marks.subn(lambda found: texts.get(found.group(), found.group()), piece) if texts else (piece, 0)
        )
        if count:
            out += _encode_piece(tokenizer, plain, first=begin == 0)
        else:
            out += ids[after:index]
        out += ids[index : index + 1]
        after, begin = index + 1, end
    return out


def _encode_piece(tokenizer: Any, text: str, first: bool) -> list[int]:
    """Return the token ids of a text between two special tokens; special tokens in it are text.

    first: whether it begins a text. Some tokenizers put a space before the first piece, some before each.
    """
    if not (first or _begins_each_piece(tokenizer)):
        return encode_plain(tokenizer, text)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids


@functools.lru_cache(maxsize=4)
def _begins_each_piece(tokenizer: Any) -> bool:
    """Return whether a text after a special token is encoded like a text that follows nothing."""
    token, number = next(iter(_special_tokens(tokenizer)[0].items()))
    alone, after = tokenizer(["a", f"{token}a"], add_special_tokens=False)["input_ids"]
    return bool(after == [number, *alone])
