"""Reads the JSON of a request from untrusted bytes: bounded in size and depth, and valid UTF-8."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from megatron_stppo.base.printing import one_line

MAX_BYTES = 2**22  # of a body: more text than a context of 10^6 tokens
MAX_DEPTH = 64
MAX_ITEMS = 2**16  # lists, objects and elements of a body; a list of token ids may have more
_OBJECT = msgspec.json.Decoder(dict[str, Any])


class Refusal(Exception):
    """The error for a request that is refused.

    Example: Refusal(400, "n: only 1 is supported").

    code: a word for programs, as in OpenAI's errors.
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(one_line(message))
        self.status, self.code = status, code


def read(content: bytes, max_items: int = MAX_ITEMS) -> dict[str, Any]:
    """Return the object. Raises Refusal. Takes time in proportion to the length."""
    if len(content) > MAX_BYTES:
        raise too_large()
    depth, items = _depth_and_items(content)
    if depth > MAX_DEPTH:
        raise Refusal(400, f"the body is nested deeper than {MAX_DEPTH} levels")
    if items > max_items:
        raise Refusal(400, f"the body has more than {max_items} lists, objects and elements")
    try:
        return _OBJECT.decode(content)
    except (UnicodeDecodeError, msgspec.MsgspecError) as error:  # also for NaN and unpaired surrogates
        raise Refusal(400, f"the body is not a JSON object ({error})") from None


def too_large() -> Refusal:
    return Refusal(413, f"the body is larger than {MAX_BYTES} bytes")


def _depth_and_items(content: bytes) -> tuple[int, int]:
    """Return the largest depth of valid JSON, and the number of its lists, objects and commas.

    Computed before it is parsed, because every item of a wrong type would become an error of the validation.
    """
    outside = b"".join(content.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])  # of strings
    codes = np.frombuffer(outside, np.uint8)
    opening, closing = (codes == ord("[")) | (codes == ord("{")), (codes == ord("]")) | (codes == ord("}"))
    depth = np.cumsum(opening.astype(np.int32) - closing)
    return int(depth.max(initial=0)), int(opening.sum() + (codes == ord(",")).sum())
