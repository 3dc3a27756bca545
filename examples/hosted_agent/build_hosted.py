"""Build the files of the hosted agent's run: facts, model, tasks, demonstrations.

    python examples/hosted_agent/build_hosted.py --output DIR [--seed 0] [--tokens 2400000]

DIR/facts.json  model/  train.jsonl  evaluate.jsonl  demonstrations.jsonl  manifest.json

The demonstrations are conversations of the agent. They teach how to call its tool and how to copy the answer.
In the last tenth 70 % answer without a call, and wrongly.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # before an installed package `build`
from build import MAX_PIECES, command, demonstrations, write_rows
from facts import Entity, entities
from geographer import TOOL
from questions import Question, ask, one_hop, row, split
from rich.progress import Progress, TimeElapsedColumn
from tiny_model import name_pieces, train_tokenizer, write_model
from trajectories import GUESS_SHARE, MADE_UP_SHARE, Inventor
from transformers import PreTrainedTokenizerFast

VERSION = 1  # raise it if the same arguments now give different files
TAGS = ("<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools:"
    "{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(argv: Sequence[str] | None = None) -> None:
    command(build, __doc__.splitlines()[0], VERSION, 2_400_000, argv)


def build(folder: Path, seed: int, tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = entities()
    asked = [question for entity in known for question in one_hop(entity)]
    facts = {question.hops[0].query: question.hops[0].passage for question in asked}
    (folder / "facts.json").write_text(
        json.dumps(facts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )
    tokenizer = train_tokenizer(map(as_text, asked), TAGS, CHAT_TEMPLATE)
    write_model(folder / "model", tokenizer, seed)
    short = (with_short_facts(entity, tokenizer) for entity in known)
    parts = split([entity for entity in short if entity.facts], seed)
    for name in ("train", "evaluate"):
        rows = (row(q, name, i) for i, q in enumerate(ask(parts[name], 0.0, seed)))
        write_rows(folder / f"{name}.jsonl", rows)
    real = frozenset(entity.name for entity in known)
    inventor = Inventor(random.Random(f"{seed}/inventor"), real, *name_pieces(tokenizer))
    script: Any = Script(parts["cold_start"], inventor, seed)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        bar = progress.add_task("demonstration tokens", total=tokens)
        rows = demonstrations(script, tokenizer, tokens, lambda done: progress.update(bar, completed=done))
        write_rows(folder / "demonstrations.jsonl", rows)


def as_text(question: Question) -> str:
    """Return the words of an episode, for the tokenizer."""
    words = ("system", "tools: look_up", "user", question.text, "assistant", call(question))
    return "\n".join((*words, "tool", question.hops[0].passage, "assistant", ""))


def call(question: Question) -> str:
    """Return what the model writes to call the tool.

    Example: <tool_call>{"name": "look_up", "arguments": {"query": "capital of Gabon"}}</tool_call>.
    """
    wanted = {"name": "look_up", "arguments": {"query": question.hops[0].query}}
    return f"<tool_call>{json.dumps(wanted, ensure_ascii=False)}</tool_call>"


def with_short_facts(entity: Entity, tokenizer: PreTrainedTokenizerFast) -> Entity:
    """Return the entity with the facts whose names a model this small can copy."""

    def short(text: str) -> bool:
        return len(tokenizer.tokenize(f" {text}")) <= MAX_PIECES

    return replace(entity, facts=tuple(f for f in entity.facts if short(entity.name) and short(f.value)))


class Script:
    """Writes conversations about the entities of the cold start; most entities are made up."""

    def __init__(self, known: Sequence[Entity], inventor: Inventor, seed: int) -> None:
        self._entities, self._inventor = known, inventor
        self._rng = random.Random(f"{seed}/script")

    def rows(self, stage: str) -> Iterator[dict[str, Any]]:
        """Yield rows of a stage, without end."""
        while True:
            entity = self._rng.choice(self._entities)
            if self._rng.random() < MADE_UP_SHARE:
                entity = self._inventor.entity(entity)
            question = self._rng.choice(one_hop(entity))
            guess = stage == "policy" and self._rng.random() < GUESS_SHARE
            said = self._guess(question) if guess else _with_the_tool(question)
            messages = [("user", question.text), *said]
            yield {
                "messages": [{"role": role, "content": content} for role, content in messages],
                "tools": [TOOL],
                "stage": stage,
            }

    def _guess(self, question: Question) -> list[tuple[str, str]]:
        wrong = self._inventor.entity(Entity("country", "", (question.answer,))).facts[0].value
        return [("assistant", f" {wrong}")]


def _with_the_tool(question: Question) -> list[tuple[str, str]]:
    """Return the messages of a call and of the answer.

    The answer begins with a space, so that it has the same tokens as in the tool's message.
    """
    return [
        ("assistant", call(question)),
        ("tool", question.hops[0].passage),
        ("assistant", f" {question.answer.value}"),
    ]


if __name__ == "__main__":
    main()
