"""Encodes conversations with an agent: messages with tool calls, and what follows a completion.

A message is a dictionary as chat templates read it: role, content, and perhaps tool_calls, tool_call_id and
name. As in chat.py, special tokens in a message are text.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_stppo.config import ConfigError
from megatron_stppo.data.text.chat import CLOSE, encode_marked, mark_special, render, unused_opening

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


def encode_conversation(
    tokenizer: Any, messages: Messages, tools: Tools = None, most: int | None = None
) -> list[int]:
    """Return the token ids of the messages, rendered by the chat template with the assistant's opening.

    tools: descriptions of functions, as the template reads them. most: see encode_marked. Raises ConfigError
    for messages that the template rejects.
    """
    text, texts = _rendered(tokenizer, messages, tools)
    return encode_marked(tokenizer, text, texts, most)


def encode_after(
    tokenizer: Any,
    messages: Messages,
    tools: Tools,
    completion: int,
    last_id: int,
    ends: Collection[int],
    most: int | None = None,
) -> list[int]:
    """Return the token ids of the template's text that follows the completion messages[completion].

    Nothing before and nothing in the completion is encoded: its ids are those that were sampled, and what
    the template makes of it, or of earlier messages, has no effect. The first id is the template's
    end-of-text token, unless the completion has it already.

    last_id: the last sampled id of the completion. ends: ids of end-of-text tokens. most: see encode_marked;
    it counts what is left of the completion's message. Raises ConfigError for
    messages that the template rejects, or if it does not end an assistant's message with such a token.
    Example: messages user, assistant, user with ChatML, last_id of "<|im_end|>" and completion=1 give the ids
    of "\\n<|im_start|>user\\n..<|im_end|>\\n<|im_start|>assistant\\n".
    """
    place = f"{unused_opening((messages, tools))}completion{CLOSE}"
    replaced = [*map(_with_one_call, messages[: completion + 1]), *messages[completion + 1 :]]
    replaced[completion] = _placed(replaced[completion], place)
    text, texts = _rendered(tokenizer, replaced, tools)
    _, found, rest = text.rpartition(place)
    ids = encode_marked(tokenizer, rest, texts, most) if found else []
    end = next((index for index, number in enumerate(ids) if number in ends), None)
    if end is None:
        raise ConfigError(
            "model.path: its chat template does not end the assistant's messages with an end-of-text "
            "token, so that the tokens that were sampled cannot be continued; change the template, or set "
            "environment.after_end=text if the environment is no agent"
        )
    return ids[end + 1 :] if ids[end] == last_id else ids[end:]


def _with_one_call(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with the last of its tool calls only. Llama 3's template rejects several."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": calls[-1:]} if calls else message


def _placed(message: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Return the message with `place` as its content, and as the name of the tool that it calls, if it does.

    Some templates leave out the content of a message that calls tools.
    """
    calls = [
        {**call, "function": {**call["function"], "name": place}} for call in message.get("tool_calls") or ()
    ]
    return {**message, "content": place} | ({"tool_calls": calls} if calls else {})


def _rendered(tokenizer: Any, messages: Messages, tools: Tools) -> tuple[str, dict[str, str]]:
    """Return the template's text with marks, and the texts of the marks (mark_special)."""
    (marked, marked_tools), texts = mark_special(tokenizer, [list(messages), list(tools or ())])
    return render(tokenizer, marked, tools=marked_tools or None), texts
