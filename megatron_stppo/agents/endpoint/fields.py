"""The rule for each field of a request. Sampling is the run's: a client cannot change it.

accepted: has the meaning of the OpenAI API, within the limits of the run.
ignored:  may have any value and has no effect.
All other fields, known or not, are refused with status 400, unless they are null or have the default value,
with which they have no effect. docs/agents.md has the table for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megatron_stppo.agents.endpoint.body import Refusal

BOTH = {
    "max_tokens",
    "stop",
    "include_stop_str_in_output",
    "stream",
    "stream_options",
    "logprobs",
    "return_token_ids",
}
ACCEPTED = {
    "chat": BOTH | {"messages", "tools", "tool_choice", "max_completion_tokens"},
    "text": BOTH | {"prompt"},
}
# Default values of the OpenAI API that differ from vLLM's, which are null, or that vLLM does not have.
DEFAULTS = {"n": 1, "best_of": 1, "response_format": {"type": "text"}, "modalities": ["text"]}
IGNORED = frozenset(
    # sampling: that of the run is used
    "temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty length_penalty "
    # amount of reasoning, which training determines
    "reasoning_effort verbosity include_reasoning parallel_tool_calls "
    # the name of the model, and notes of the client
    "model user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "request_id session_id priority cache_salt "
    # form of the text: special tokens that the policy writes are text
    "skip_special_tokens spaces_between_special_tokens stream_interval".split()
)


def check(kind: str, body: Mapping[str, Any], protocol: type[BaseModel]) -> dict[str, Any]:
    """Return the accepted fields of a request. Raises Refusal for one that must not be used.

    kind: "chat" or "text". protocol: vLLM's class of the request, whose defaults have no effect.
    """
    for name, value in body.items():
        if name in ACCEPTED[kind] or name in IGNORED or value is None:
            continue
        field = protocol.model_fields.get(name)
        default = field.get_default(call_default_factory=False) if field else PydanticUndefined
        if value != default and value not in ([], {}) and value != DEFAULTS.get(name, default):
            raise Refusal(400, f"{name[:40]!r} is not supported; remove it (docs/agents.md has all fields)")
    return {name: value for name, value in body.items() if name in ACCEPTED[kind]}
