"""Encodes and decodes text that follows other tokens: turns, observations, what a client adds to a text.

Tokenizers of the kind of Llama 2 put a space before every text, and their decoders remove one. Both are right
for a whole text only. Here neither happens: tokens and text are those of the middle of a text, and text that
is encoded is decoded with the same spaces. Special tokens in the text are text.
"""

import copy
import functools
import itertools
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from megatron_stppo.config import ConfigError

# What parts of a tokenizer do at an end of a text, and the setting with which they do not.
_WITHOUT: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "normalizer": {"Prepend": {"prepend": ""}, "Strip": {"strip_left": False, "strip_right": False}},
    "pre_tokenizer": {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}},
    "decoder": {"Metaspace": {"prepend_scheme": "never"}, "Strip": {"start": 0, "stop": 0}},
}


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of untrusted text that follows other tokens. "<|im_end|>" in it becomes text."""
    ids: list[int] = _continuing(tokenizer).encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids


def beginning(
    tokenizer: Any, text: str, count: int, encode: Callable[[Any, str], list[int]] = encode_plain
) -> str:
    """Return a beginning of a long text that has the same first `count` tokens; a short text as it is.

    Encoding takes time in proportion to the length, and an observation may have megabytes. A beginning is
    long enough if it can be shown that what follows has no effect on those tokens:

    - The text is cut at several places (_cuts), of which at least one lies between two of its tokens. The
      tokens before such a place are those of the text up to it: BPE merges nothing across it, and the best
      path of a unigram model to it depends on nothing behind it. So the first tokens that the texts up to
      each of these places share are those of the whole text.
    - The end of a text changes its last word: a contraction, or a word that is a token as a whole. This
      reaches less far than the longest token, so there must be as many tokens more.
    - An expression of a pre-tokenizer may take white space up to its last line break as one word, and
      capitals together with the letters before them if a small letter follows ("一AAb" in o200k). After white
      space or a capital at a place, the text up to it must share the tokens also with that continuation.

    Otherwise a beginning twice as long is tried. The last two points hold for expressions as of GPT-2,
    Llama 3, Qwen and o200k, in which nothing else reaches further. encode: (tokenizer, text) -> ids.
    """
    if len(text) <= 8 * count:
        return text
    needed = count + _shape(tokenizer).longest
    size = 4 * needed
    while 2 * size < len(text):
        ends = _cuts(tokenizer, text, size)
        tried = [text[:end] for end in ends]
        spaces, capitals = ([one for one in tried if f(one[-1])] for f in (str.isspace, str.istitle))
        tried += [f"{one}\n" for one in spaces] + [f"{one}a" for one in capitals]
        if len(tried) * size < len(text):  # else encoding the whole text is cheaper
            found = [encode(tokenizer, one) for one in tried]
            if found and all(len(ids) >= needed and ids[:count] == found[0][:count] for ids in found):
                return tried[0]
        size *= 2
    return text


@dataclass(frozen=True)
class _Shape:
    """What the tokens of a vocabulary look like, with characters as they are written in it ("Ġ" or "▁").

    longest: the length of the longest token. reach: two characters that follow each other in a token -> the
    length of the longest such token. ascii: how an ASCII character is written.
    """

    longest: int
    reach: Mapping[tuple[str, str], int]
    ascii: Mapping[str, str]


@functools.lru_cache(maxsize=4)
def _shape(tokenizer: Any) -> _Shape:
    alone = {c: tokenizer.convert_ids_to_tokens(encode_plain(tokenizer, c)) for c in map(chr, range(128))}
    ascii = {c: tokens[0] for c, tokens in alone.items() if len(tokens) == 1 and len(tokens[0]) == 1}
    added = ("".join(ascii.get(c, c) for c in token) for token in tokenizer.get_added_vocab())
    reach: dict[tuple[str, str], int] = {}
    tokens = sorted({*tokenizer.get_vocab(), *added}, key=len)
    for token in tokens:
        reach.update(dict.fromkeys(itertools.pairwise(token), len(token)))
    return _Shape(len(tokens[-1]), reach, ascii)


def _cuts(tokenizer: Any, text: str, size: int) -> Sequence[int]:
    """Return places in the text, at most `size`, of which at least one lies between two tokens of the text.

    No token lies on both sides of a place between two characters that follow each other in no token. If the
    longest token with both has 5 characters, a token begins at the place or at one of the 4 before it. Two
    digits may be of a mark (chat.py). No places if the normaliser changes characters there together with
    those behind.
    """
    shape = _shape(tokenizer)
    reach, last = shape.longest, size
    for end in range(size, size // 2, -1):
        pair = text[end - 1 : end + 1]
        if pair.isascii() and all(c in shape.ascii for c in pair) and not pair.isdecimal():
            found = shape.reach.get((shape.ascii[pair[0]], shape.ascii[pair[1]]), 1)
            if found < reach:
                reach, last = found, end
        if reach == 1:
            break
    near = text[last - reach : last + 1]
    normalizer = _continuing(tokenizer).backend_tokenizer.normalizer
    becomes = near if normalizer is None else normalizer.normalize_str(near)
    bound = len(becomes) < len(near) or any(map(unicodedata.combining, near + becomes))
    return [] if bound else range(last - reach + 1, last + 1)


def decode_plain(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of tokens that follow others. Special tokens are decoded as text.

    Example: with the tokenizer of Llama 2, "▁Paris" is " Paris", where tokenizer.decode returns "Paris".
    """
    text: str = _continuing(tokenizer).decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def check_continues(backend: Tokenizer, where: str) -> None:
    """Raise ConfigError if text that follows other text cannot be encoded and decoded exactly.

    where: names the tokenizer, at the beginning of the message.
    """
    after = _without_ends(backend) or backend
    begun = backend.encode("a", add_special_tokens=False).ids
    added = after.encode(" a", add_special_tokens=False).ids
    text, both = (backend.decode(ids, skip_special_tokens=False) for ids in (begun, begun + added))
    if both != text + " a" or after.decode(added, skip_special_tokens=False) != " a":
        raise ConfigError(
            f"{where}: its tokenizer does not keep spaces ({text!r} and then ' a' is decoded as {both!r}); "
            "use a byte-level tokenizer or one of the kind of Llama 2; if its tokenizer.json is one, set "
            "tokenizer_class=PreTrainedTokenizerFast in tokenizer_config.json"
        )


@functools.lru_cache(maxsize=4)
def _continuing(tokenizer: Any) -> Any:
    """Return the tokenizer for text that follows other text: itself, or a changed copy."""
    changed = _without_ends(tokenizer.backend_tokenizer)
    if changed is None:
        return tokenizer
    after = copy.copy(tokenizer)
    after._tokenizer = changed
    return after


def _without_ends(backend: Tokenizer) -> Tokenizer | None:
    """Return a copy that does nothing at the ends of a text; None if the tokenizer itself does not.

    Only a tokenizer that needs it is copied, because the copy of a large vocabulary takes seconds.
    """
    parts = {name: getattr(backend, name) for name in _WITHOUT}
    given = {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}
    changed = {name: _changed(part, _WITHOUT[name]) for name, part in given.items()}
    if changed == given:
        return None
    return Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | changed))


def _changed(part: Any, settings: Mapping[str, Mapping[str, Any]]) -> Any:
    if isinstance(part, list):
        return [_changed(one, settings) for one in part]
    if isinstance(part, dict):
        inner = {name: _changed(value, settings) for name, value in part.items()}
        return {**inner, **settings.get(str(part.get("type")), {})}
    return part
