"""Reads the JSON of a request from untrusted bytes: bounded in size and depth, and valid UTF-8."""

from __future__ import annotations

import json
import re
from typing import Any

from megatron_stppo.endpoint.refusal import Refusal

MAX_BYTES = 2**22  # of a body: more text than a context of 10^6 tokens
MAX_DEPTH = 64
# A string of JSON, or one bracket. Possessive quantifiers keep the scan linear.
_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def read(content: bytes) -> dict[str, Any]:
    """Return the object. Raises Refusal."""
    if len(content) > MAX_BYTES:
        raise too_large()
    if _depth(content) > MAX_DEPTH:
        raise Refusal(400, f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not valid UTF-8") from None
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body must be a JSON object")
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise Refusal(400, "the body has an unpaired surrogate") from None
    return value


def too_large() -> Refusal:
    return Refusal(413, f"the body is larger than {MAX_BYTES} bytes")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _depth(content: bytes) -> int:
    depth = deepest = 0
    for part in _PARTS.finditer(content):
        first = part[0][:1]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first in b"]}":
            depth -= 1
    return deepest
