"""The environment: questions with a search. A turn is a line: `search: capital of Peru` or `answer: Lima`."""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Message, Outcome, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.answers import exact_match
from megatron_stppo.environments.base import Environment, StepResult
from megatron_stppo.environments.retrieval import Document, Retriever
from megatron_stppo.environments.search import open_retriever

INSTRUCTION = "Write search: words, then answer: words."
SEARCH = re.compile(r"search:(.*)\n+")
ANSWER = re.compile(r"answer:(.*)\n+")


class Searcher:
    """One episode: up to `turns` turns; the reward is 1 for the right answer, else 0.

    extra_info.path has the ids of the documents that lead to the answer, in order: a hop is solved when its
    document is found after those of the hops before it.
    """

    stop_strings = ("\n",)

    def __init__(self, retriever: Retriever, topk: int, turns: int) -> None:
        self.retriever, self.topk, self.left = retriever, topk, turns

    async def reset(self, task: Task, seed: int) -> list[Message]:
        self.task, self.queries, self.hops = task, list[str](), 0
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        self.left -= 1
        search, answer = SEARCH.fullmatch(action), ANSWER.fullmatch(action)
        if answer is not None:
            return self.end(exact_match(answer[1], self.task.targets), True, one_line(answer[1].strip()))
        if self.left <= 0:
            return self.end(False, search is not None, "no answer")
        if search is None:
            return StepResult(render([]), 0.0, False, False)
        self.queries.append(search[1].strip())
        found = await self.retriever.search(search[1], self.topk)
        path = self.task.extra["path"]
        self.hops += self.hops < len(path) and path[self.hops] in {document.id for document in found}
        return StepResult(render(found), 0.0, False, True, 1)

    def end(self, right: bool, valid: bool, detail: str) -> StepResult:
        metrics = {
            f"right/{self.task.data_source}": float(right),
            f"searches/{self.task.data_source}": float(len(self.queries)),
            "hops_solved": self.hops / len(self.task.extra["path"]),
            "repeated_queries": float(len(self.queries) - len(set(self.queries))),
        }
        outcome: Outcome = "ok" if right else "wrong"
        return StepResult("", float(right), True, valid, 0, outcome, detail, metrics=metrics)

    async def close(self) -> None: ...


def render(found: list[Document]) -> str:
    """Return the documents as lines, best first."""
    return "".join(f"- {one_line(text)}\n" for text in [one.text for one in found] or ["nothing"])


def prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]


def factory(section: EnvironmentConfig) -> Callable[[], Environment]:
    retriever = open_retriever(section)
    return lambda: Searcher(retriever, section.retrieval.topk, section.max_turns)
