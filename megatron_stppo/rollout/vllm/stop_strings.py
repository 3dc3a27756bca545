"""Detection of the token that completes a stop string, without decoding every token of every step.

A stop string of n bytes that ends in the newest token lies within the last n tokens that print text, because
each of them holds at least one byte. Decoding and searching these n tokens is therefore exact. It is done
only if the newest token can hold the last character of a stop string. The text of each token id is cached,
for all finders of an engine together. The text is that which the environment reads (decode_plain).

Tokens of one byte (byte fallback) are decoded together: one wrong byte makes UNFINISHED of all that are side
by side. So a window that begins with such a token is extended to the first of them.
"""

import re
from collections.abc import Sequence
from typing import Any

from megatron_stppo.data.text.plain_text import decode_plain, encode_plain

UNFINISHED = "\ufffd"  # printed by decoders for the bytes of an incomplete character
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of one byte (byte fallback)


class StopFinder:
    """Search for the stop strings of one kind of request.

    Raises ValueError for an empty stop string.
    Example: with one token per character, StopFinder(tokenizer, ("</a>",)).completed(ids of "x</a>")
    is True, and completed(ids of "x</a") is False.
    """

    def __init__(
        self, tokenizer: Any, stop_strings: Sequence[str], printed: dict[int, str] | None = None
    ) -> None:
        """printed: the texts of token ids that are known; new ones are added. Default: none."""
        if any(not stop for stop in stop_strings):
            raise ValueError(
                f"stop_strings={tuple(stop_strings)!r}: an empty string stops at once; remove it"
            )
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        endings = {stop[-1] for stop in self._stops}
        # The bytes of a split character print as UNFINISHED; they may complete a last character of several.
        self._endings = endings if all(map(str.isascii, endings)) else endings | {UNFINISHED}
        self._window = max((len(stop.encode()) for stop in self._stops), default=0)
        self._printed = {} if printed is None else printed

    def completed(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last of `token_ids` completes a stop string.

        `token_ids` are the tokens of one turn so far. Call this after each token: a stop string that an
        earlier token completed may not be found.
        """
        if not self._stops or self._endings.isdisjoint(self._text(token_ids[-1])):
            return False
        tail = decode_plain(self._tokenizer, self._tail(token_ids))
        return any(stop in tail for stop in self._stops)

    def end_with(self, text: str) -> bool:
        """Return whether a turn of this text ends with a stop string, and no token before its last has one.

        Example: with the stop string "!", "a!" is such a text; "a" and "a! b" are not.
        """
        ids = encode_plain(self._tokenizer, text)
        return next((n for n in range(1, len(ids) + 1) if self.completed(ids[:n])), None) == len(ids)

    def _tail(self, token_ids: Sequence[int]) -> list[int]:
        start, printing = len(token_ids), 0
        while start > 0 and printing < self._window:
            start -= 1
            printing += bool(self._text(token_ids[start]))
        while start > 0 and self._is_byte(token_ids[start]) and self._is_byte(token_ids[start - 1]):
            start -= 1
        return list(token_ids[start:])

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or "") is not None

    def _text(self, token_id: int) -> str:
        text = self._printed.get(token_id)
        if text is None:
            text = self._printed[token_id] = decode_plain(self._tokenizer, [token_id])
        return text
