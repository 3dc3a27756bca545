"""examples/hosted_agent: an agent that knows nothing of training, and demonstrations of its conversations."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import build_hosted
import pytest
from transformers import AutoTokenizer

from megatron_stppo.data.demonstrations import read
from megatron_stppo.data.tasks import read as read_tasks

EXAMPLE = Path(__file__).parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosted")
    build_hosted.main(["--output", str(folder), "--tokens", "8000"])
    return folder


def test_the_agent_imports_nothing_but_openais_sdk_and_names_no_address() -> None:
    source = (EXAMPLE / "geographer.py").read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert names - set(sys.stdlib_module_names) == {"openai"}
    (client,) = (n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "OpenAI")
    assert not client.args and not client.keywords, "address and key are those of the environment"


def test_demonstrations_are_conversations_that_call_the_tool_or_guess_wrongly(built: Path) -> None:
    rows = [json.loads(line) for line in (built / "demonstrations.jsonl").read_text().splitlines()]
    lengths = {
        stage: [len(r["messages"]) for r in rows if r["stage"] == stage] for stage in ("skill", "policy")
    }
    assert set(lengths["skill"]) == {4} and set(lengths["policy"]) == {2, 4}
    _, call, result, answer = (message["content"] for message in rows[0]["messages"])
    wanted = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert wanted["name"] == rows[0]["tools"][0]["function"]["name"]
    assert result == f"The {wanted['arguments']['query']} is{answer}."


def test_a_demonstration_has_the_tools_and_every_name_has_the_same_tokens(built: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(built / "model")
    first = read(built / "demonstrations.jsonl", tokenizer, 400)[0]
    text = tokenizer.decode(first.token_ids)
    assert text.startswith("<|im_start|>system\ntools: look_up<|im_end|>\n<|im_start|>user\nName the ")
    answer = text.rpartition("assistant\n")[2].removesuffix("<|im_end|>")
    ids, wanted = list(first.token_ids), tokenizer.encode(answer)
    assert sum(ids[i : i + len(wanted)] == wanted for i in range(len(ids))) == 2, (
        "in the result and the answer"
    )


def test_the_tool_knows_every_question_and_no_question_is_asked_in_both_splits(built: Path) -> None:
    facts = json.loads((built / "facts.json").read_text())
    asked = {
        split: {task.prompt[0].content: task.targets for task in read_tasks(built / f"{split}.jsonl")}
        for split in ("train", "evaluate")
    }
    for question, targets in (asked["train"] | asked["evaluate"]).items():
        assert targets[0] in facts[question.removeprefix("Name the ").removesuffix(".")]
    assert not set(asked["train"]) & set(asked["evaluate"]) and len(asked["evaluate"]) > 96
