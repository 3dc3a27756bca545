"""Reads the JSON of a request from untrusted bytes: bounded in size and depth, and valid UTF-8."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np

from megatron_stppo.base.printing import one_line

MAX_BYTES = 2**22  # of a body: more text than a context of 10^6 tokens
MAX_DEPTH = 64
MAX_ITEMS = 2**16  # lists, objects and elements of a body; a list of token ids may have more
_OBJECT = msgspec.json.Decoder(dict[str, Any])
# What a field of any API must be, accepted or ignored: (names, types, the types in words).
_TYPES: tuple[tuple[str, tuple[type, ...], str], ...] = (
    (
        "temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty "
        "length_penalty max_tokens max_completion_tokens max_output_tokens priority stream_interval",
        (int, float),
        "a number",
    ),
    (
        "stream store parallel_tool_calls include_stop_str_in_output return_token_ids include_reasoning "
        "skip_special_tokens spaces_between_special_tokens",
        (bool,),
        "true or false",
    ),
    (
        "model user service_tier safety_identifier prompt_cache_key prompt_cache_retention reasoning_effort "
        "verbosity request_id session_id cache_salt inference_geo speed user_profile_id workspace_id",
        (str,),
        "a text",
    ),
    (
        "metadata stream_options cache_control client_metadata prompt_cache_options diagnostics thinking "
        "output_config context_management",
        (dict,),
        "an object",
    ),
)
TYPES = {name: (types, said) for names, types, said in _TYPES for name in names.split()}
# What joins the texts of one content. Blocks of a system prompt are texts of their own; others are one text.
BETWEEN = {"system": "\n\n", "developer": "\n\n"}


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


def fields(
    body: Mapping[str, Any],
    accepted: Collection[str],
    ignored: Collection[str],
    defaults: Mapping[str, Collection[Any]],
    needed: Collection[str] = (),
) -> dict[str, Any]:
    """Return the accepted fields that are not null. Raises Refusal for one that must not be used, and for a
    value that has not the type of its field.

    defaults: values of other fields that change nothing. null, [] and {} change nothing in any field.
    """
    for name in needed:
        if body.get(name) is None:
            raise Refusal(400, f"{name}: must be given")
    for name, value in body.items():
        if value is None:
            continue
        types, said = TYPES.get(name, ((type(value),), ""))
        if type(value) not in types:  # a bool is no number
            raise Refusal(400, f"{name}: must be {said}")
        if name in accepted or name in ignored or value in ([], {}):
            continue
        if value not in defaults.get(name, ()):
            raise Refusal(400, f"{name[:40]!r} is not supported; remove it (docs/agents.md has all fields)")
    return {name: value for name, value in body.items() if name in accepted and value is not None}


def listed(where: str, value: Any) -> list[Any]:
    """Return the value if it is a list. Raises Refusal."""
    if not isinstance(value, list):
        raise Refusal(400, f"{where}: must be a list")
    return value


def objects(where: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return (place, object) for every element of a list of objects. Raises Refusal."""
    placed = [(f"{where}[{place}]", element) for place, element in enumerate(listed(where, value))]
    for place, element in placed:
        if not isinstance(element, dict):
            raise Refusal(400, f"{place}: must be an object")
    return placed


def texts(where: str, content: Any, kinds: Collection[str] = ("text",), role: str = "") -> str:
    """Return the text of a content: a text, or a list of parts of the given types, which are joined.

    Raises Refusal for everything else. Example: "ab" for [{"type": "text", "text": "a"}, {.. "text": "b"}].
    """
    if isinstance(content, str):
        return content
    parts = (text_of(place, part, kinds) for place, part in objects(where, content))
    return BETWEEN.get(role, "").join(parts)


def text_of(where: str, part: Mapping[str, Any], kinds: Collection[str] = ("text",)) -> str:
    """Return the text of one part of a content. Raises Refusal unless it is text."""
    kind, text = part.get("type"), part.get("text")
    if kind not in kinds or not isinstance(text, str):
        raise unsupported(where, kind, kinds)
    return text


def unsupported(where: str, kind: Any, kinds: Collection[str]) -> Refusal:
    return Refusal(400, f"{where}: the type {str(kind)[:40]!r} is not supported; only {', '.join(kinds)}")


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
