"""Conversations with the chat templates of Qwen2.5, Qwen3 and Llama 3, as their models ship them.

`make test-agents` installs them with the package trl, which has copies of the originals.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.agents.packages.conversations import FAMILIES, THOUGHT, Asked, record_all
from tests.agents.packages.scripted import ROOT
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)  # seconds; vLLM takes long to import
each = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    places = list(ROOT.glob(".venv-templates/lib/python3*/site-packages/trl/chat_templates"))
    if not places:
        pytest.skip("needs the templates: make test-agents")
    templates = {name: (places[0] / f"{name}.jinja").read_text(encoding="utf-8") for name in FAMILIES}
    found: dict[str, Any] = run_ranks(record_all, 1, templates, timeout=300)[0]
    return found


def of(recorded: dict[str, Any], name: str, conversation: str) -> list[Asked]:
    asked = recorded[name][conversation]
    assert isinstance(asked, list), asked
    return asked


@each
def test_every_prompt_is_the_templates_text_and_begins_with_the_earlier_tokens(
    recorded: dict[str, Any], name: str
) -> None:
    asked = of(recorded, name, "one call")
    assert [(one.history, one.continues) for one in asked] == [(0, True)] * 3
    assert all(one.prompt == one.official for one in asked)


@each
def test_two_calls_in_a_turn_are_continued_also_if_the_template_rejects_them(
    recorded: dict[str, Any], name: str
) -> None:
    first, second = of(recorded, name, "two calls")
    assert (second.history, second.continues) == (0, True)
    assert second.official == ("" if name.startswith("llama") else second.prompt)
    results = second.prompt.removeprefix(first.prompt)
    assert results.index("Paris") < results.index("Rome")


@each
def test_thinking_that_a_client_repeats_stays_also_if_the_template_drops_it(
    recorded: dict[str, Any], name: str
) -> None:
    _, second = of(recorded, name, "repeated thinking")
    assert (second.history, second.continues) == (0, True) and THOUGHT in second.prompt
    dropped = THOUGHT if name == "qwen3" else ""
    assert second.prompt.replace(dropped, "") == second.official


@each
def test_thinking_that_a_client_drops_begins_a_history_that_reads_the_templates_text(
    recorded: dict[str, Any], name: str
) -> None:
    _, second = of(recorded, name, "dropped thinking")
    assert second.history == 1 and "<think>" not in second.prompt and second.prompt == second.official
