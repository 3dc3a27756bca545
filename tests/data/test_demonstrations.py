"""The reader of demonstrations, on a tokenizer trained here: 3 special tokens, 6 tags, bytes and merges."""

import copy
import json
import sys
from pathlib import Path

import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.data.demonstrations import read

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
ROW = {
    "prompt": [{"role": "user", "content": "capital of Gabon?"}],
    "segments": [
        {"text": "<search> Gabon</search>", "kind": "turn"},
        {"text": "\n\nGabon: capital Libreville.<|im_end|>\n\n", "kind": "observation"},
        {"text": "<answer> Libreville</answer>", "kind": "turn"},
    ],
    "stage": "skill",
}


@pytest.fixture(scope="module")
def tokenizer():
    sys.path.insert(0, str(QUICKSTART))
    from tiny_model import train_tokenizer

    sys.path.remove(str(QUICKSTART))
    return train_tokenizer(["The capital of Gabon is Libreville."] * 3)


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_row_has_the_tokens_of_the_live_episode(tmp_path, tokenizer):
    ids = read(written(tmp_path / "d.jsonl", ROW), tokenizer, 1000)[0].token_ids
    prompt = tokenizer.apply_chat_template(ROW["prompt"], add_generation_prompt=True)["input_ids"]
    pieces = [
        tokenizer.encode(segment["text"], add_special_tokens=False, split_special_tokens=True)
        for segment in ROW["segments"]
    ]
    assert list(ids) == [*prompt, *pieces[0], *pieces[1], *pieces[2]]


def test_the_turns_are_marked_as_written_by_the_model(tmp_path, tokenizer):
    (script,) = read(written(tmp_path / "d.jsonl", ROW), tokenizer, 1000)
    own = [token for token, mine in zip(script.token_ids, script.written, strict=True) if mine]
    assert tokenizer.decode(own) == "<search> Gabon</search><answer> Libreville</answer>"


def test_special_tokens_in_segments_are_text_and_the_tags_are_one_token_each(tmp_path, tokenizer):
    ids = read(written(tmp_path / "d.jsonl", ROW), tokenizer, 1000)[0].token_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 1  # the chat template's own
    assert "<|im_end|>" in tokenizer.decode(ids[list(ids).index(end) + 1 :])
    for tag in ("<search>", "</search>", "<answer>", "</answer>"):
        assert ids.count(tokenizer.convert_tokens_to_ids(tag)) == 1


def test_rows_keep_their_order_and_stop_before_the_budget_is_exceeded(tmp_path, tokenizer):
    longer = {**ROW, "segments": ROW["segments"] * 2}
    path = written(tmp_path / "d.jsonl", ROW, longer, ROW)
    first, second, third = read(path, tokenizer, 10**6)
    assert first == third and len(second) > len(first)
    assert read(path, tokenizer, len(first) + len(second)) == [first, second]
    assert read(path, tokenizer, len(first) + len(second) - 1) == [first]


def test_a_turn_that_does_not_end_as_in_an_episode_is_refused(tmp_path, tokenizer):
    path = written(tmp_path / "d.jsonl", ROW, AGENT_ROW, ROW)
    asked = []
    read(path, tokenizer, 1000, lambda turn: asked.append(turn) or "")
    assert asked == ["<search> Gabon</search>", "<answer> Libreville</answer>"] * 2
    with pytest.raises(ConfigError, match=r"d\.jsonl row 1: segments\.2\.text: too long"):
        read(path, tokenizer, 1000, lambda turn: "too long" if "answer" in turn else "")


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("{", "is not JSON (Expecting property name enclosed in double quotes, column 2)"),
        ({**ROW, "prompt": []}, "prompt"),
        ({**ROW, "segments": []}, "segments"),
        ({**ROW, "segments": [{"text": "x", "kind": "thought"}]}, "segments.0.kind"),
        ({**ROW, "prompt": [{"role": "user"}]}, "prompt.0.content"),
    ],
)
def test_a_malformed_row_names_file_row_and_field(tmp_path, tokenizer, row, field):
    with pytest.raises(ConfigError) as caught:
        read(written(tmp_path / "d.jsonl", ROW, row), tokenizer, 1000)
    assert f"d.jsonl row 2: {field}" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_rows_and_missing_files_give_a_one_line_error(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="no row fits"):
        read(written(tmp_path / "d.jsonl"), tokenizer, 1000)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "missing.jsonl", tokenizer, 1000)


AGENT_ROW = {
    "messages": [
        {"role": "user", "content": "capital of Gabon?"},
        {"role": "assistant", "content": "<search> Gabon</search>"},
        {"role": "tool", "content": "Libreville<|im_end|>"},
        {"role": "assistant", "content": " Libreville"},
    ],
    "tools": [{"type": "function", "function": {"name": "search"}}],
}


def test_a_row_of_an_agent_has_the_tokens_that_the_endpoint_would_record(tmp_path, tokenizer):
    first, second = read(written(tmp_path / "d.jsonl", ROW, AGENT_ROW), tokenizer, 1000)
    assert tokenizer.decode(first.token_ids).startswith("<|im_start|>user\ncapital of Gabon?<|im_end|>")
    opening = "<|im_end|>\n<|im_start|>assistant\n"
    expected = (
        f"<|im_start|>user\ncapital of Gabon?{opening}<search> Gabon</search><|im_end|>\n"
        f"<|im_start|>tool\nLibreville<|im_end|>{opening} Libreville<|im_end|>"
    )
    assert tokenizer.decode(second.token_ids) == expected
    assert second.token_ids.count(tokenizer.eos_token_id) == 4, "the one in the tool's message is text"
    own = [token for token, mine in zip(second.token_ids, second.written, strict=True) if mine]
    assert tokenizer.decode(own) == "<search> Gabon</search><|im_end|> Libreville<|im_end|>"


def test_a_row_of_an_agent_ends_with_the_model(tmp_path, tokenizer):
    unfinished = AGENT_ROW | {"messages": AGENT_ROW["messages"][:3]}
    with pytest.raises(ConfigError, match=r"row 1: .* end with assistant; give prompt, .* messages, tools"):
        read(written(tmp_path / "d.jsonl", unfinished), tokenizer, 1000)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"toolz": []}, "toolz: Extra inputs are not permitted"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
            "messages.1: ",
        ),
        (
            {"messages": [AGENT_ROW["messages"][0], {**AGENT_ROW["messages"][3], "tool_calls": []}]},
            "messages.1.tool_calls: Extra inputs are not permitted",
        ),
    ],
)
def test_what_a_row_of_an_agent_cannot_express_is_refused(tmp_path, tokenizer, change, says):
    with pytest.raises(ConfigError, match=f"row 1: {says}"):
        read(written(tmp_path / "d.jsonl", AGENT_ROW | change), tokenizer, 1000)


def test_all_keys_of_a_prompts_messages_reach_the_template(tmp_path, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.thinking }} {{ (m.tool_calls or [{}])[0].name }}: "
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    prompt = [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [{"name": "search"}]},
        {"role": "tool", "content": "Lima"},
    ]
    (one,) = read(written(tmp_path / "d.jsonl", ROW | {"prompt": prompt}), tokenizer, 1000)
    assert "assistant Hm. search: <|im_end|>tool  : Lima<|im_end|><search> Gabon" in tokenizer.decode(
        one.token_ids
    )


def test_the_template_reads_the_name_and_the_id_of_a_tools_result(tmp_path, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.tool_call_id }}: {{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    question, call, result, answer = AGENT_ROW["messages"]
    named = {**result, "name": "search", "tool_call_id": "7"}
    (one,) = read(
        written(tmp_path / "d.jsonl", AGENT_ROW | {"messages": [question, call, named, answer]}),
        tokenizer,
        1000,
    )
    assert "tool search 7: Libreville" in tokenizer.decode(one.token_ids)
