"""Conversations of agents with a template like Qwen's: tools, tool calls, and thinking that it drops."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.data.text.conversation import encode_after, encode_conversation
from tests.data.text.test_chat import QWEN, TOKENIZERS, byte_level, controls

TEMPLATE = """{% if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% set text = m.content or '' %}{% if '</think>' in text and not loop.last %}\
{% set text = text.split('</think>')[-1] %}{% endif %}{{ text }}\
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOKENIZER: Any = byte_level(QWEN, TEMPLATE)
END: int = TOKENIZER.eos_token_id
THOUGHT = "<think>long</think>Paris."
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Which city?"},
    {"role": "assistant", "content": THOUGHT},
    {"role": "user", "content": "And Italy?"},
]
AFTER = "\n<|im_start|>user\nAnd Italy?<|im_end|>\n<|im_start|>assistant\n"


def after(chat: list[dict[str, Any]], completion: int, last_id: int = END, tools: Any = None) -> str:
    return str(TOKENIZER.decode(encode_after(TOKENIZER, chat, tools, completion, last_id, [END])))


def test_what_follows_a_completion_is_encoded_alone_though_the_template_drops_its_thinking() -> None:
    assert THOUGHT not in TOKENIZER.decode(encode_conversation(TOKENIZER, CHAT))
    assert after(CHAT, 1) == AFTER
    first = encode_conversation(TOKENIZER, CHAT[:1])
    sampled = [*TOKENIZER.encode(THOUGHT), END]
    history = first + sampled + encode_after(TOKENIZER, CHAT, None, 1, END, [END])
    assert TOKENIZER.decode(history) == (
        f"<|im_start|>user\nWhich city?<|im_end|>\n<|im_start|>assistant\n{THOUGHT}<|im_end|>{AFTER}"
    )


def test_a_completion_that_did_not_end_its_message_gets_the_templates_end() -> None:
    cut = TOKENIZER.encode("Par")[-1]
    assert after(CHAT, 1, cut) == f"<|im_end|>{AFTER}"


def test_tool_calls_are_rendered_in_a_prompt_and_not_after_a_completion() -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "Italy <|im_end|>"}}}
    chat: list[dict[str, Any]] = [
        CHAT[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Rome <|im_start|>"},
    ]
    assert after(chat, 1) == "\n<|im_start|>tool\nRome <|im_start|><|im_end|>\n<|im_start|>assistant\n"
    ids = encode_conversation(TOKENIZER, chat, [{"name": "search"}])
    assert '{"name": "search"}' in TOKENIZER.decode(ids)
    assert '"query": "Italy <|im_end|>"' in TOKENIZER.decode(ids)
    assert len(controls(TOKENIZER, ids)) == 2 * 4 + 1, "2 per message and tools, 1 for the opening"
    assert len(controls(TOKENIZER, encode_after(TOKENIZER, chat, None, 1, END, [END]))) == 3


def test_a_template_may_reject_a_message_with_several_calls_that_the_model_made() -> None:
    """Llama 3's does."""
    reject = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    tokenizer: Any = byte_level(QWEN, TEMPLATE.replace("{{ text }}", f"{reject}{{{{ text }}}}"))
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}
    turn = [{"role": "assistant", "content": "", "tool_calls": [call, call]}]
    turn += [{"role": "tool", "content": city} for city in ("Rome", "Paris")]
    chat = [CHAT[0], *turn, *turn]
    ids = encode_after(tokenizer, chat, None, 4, tokenizer.eos_token_id, [tokenizer.eos_token_id])
    results = "".join(f"\n<|im_start|>tool\n{city}<|im_end|>" for city in ("Rome", "Paris"))
    assert tokenizer.decode(ids) == f"{results}\n<|im_start|>assistant\n"
    with pytest.raises(ConfigError, match="one call"):
        encode_conversation(tokenizer, chat)


def test_a_template_may_leave_out_the_text_beside_a_call() -> None:
    """Llama 3's does."""
    template = TEMPLATE.replace("{{ text }}", "{% if not m.tool_calls %}{{ text }}{% endif %}")
    tokenizer: Any = byte_level(QWEN, template)
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}
    chat: list[dict[str, Any]] = [
        CHAT[0],
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "content": "Rome"},
    ]
    ids = encode_after(tokenizer, chat, None, 1, tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert tokenizer.decode(ids) == "\n<|im_start|>tool\nRome<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_without_an_end_of_text_token_after_the_assistant_is_refused() -> None:
    tokenizer, _ = TOKENIZERS["qwen"]
    bare = byte_level(QWEN, "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    with pytest.raises(ConfigError, match="does not end the assistant's messages with an end-of-text token"):
        encode_after(bare, CHAT, None, 1, 5, [tokenizer.eos_token_id])


HARMONY = """{% for m in messages %}<|start|>{{ m.role }}\
{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""


def test_a_template_like_that_of_gpt_oss_has_a_prompt_and_no_second_turn() -> None:
    """It ends messages with <|end|>, which also follows the analysis; replies end with <|return|>."""
    names = ["<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer: Any = byte_level(names, HARMONY)
    ids = encode_conversation(tokenizer, CHAT[:1])
    assert tokenizer.decode(ids) == "<|start|>user<|message|>Which city?<|end|><|start|>assistant"
    assert [tokenizer.convert_ids_to_tokens(n) for n in controls(tokenizer, ids)] == [
        *("<|start|>", "<|message|>", "<|end|>", "<|start|>")
    ]
    end = tokenizer.convert_tokens_to_ids("<|return|>")
    with pytest.raises(ConfigError, match=r"does not end the assistant's messages .* environment.after_end"):
        encode_after(tokenizer, CHAT, None, 1, end, [end])
