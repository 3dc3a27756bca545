"""Encodes and decodes text that follows other tokens: turns, observations, what a client adds to a text.

Tokenizers of the kind of Llama 2 put a space before every text, and their decoders remove one. Both are right
for a whole text only. Here neither happens: tokens and text are those of the middle of a text, and text that
is encoded is decoded with the same spaces. Special tokens in the text are text.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
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
