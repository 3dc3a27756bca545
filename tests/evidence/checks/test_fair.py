"""The checks of fair.py on the search environment, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments import search
from megatron_stppo.environments.base import StepResult
from megatron_stppo.environments.retrieval import BM25Retriever
from megatron_stppo.evidence.checks import fair
from megatron_stppo.rollout.episodes import episode
from megatron_stppo.rollout.episodes.episode import Episode
from tests.rollout.vllm.tiny import build_tokenizer

TASKS = [
    Task("capitals", (Message("user", "Which city is the capital of Gabon?"),), ("Libreville",), "train", 0),
    Task("capitals", (Message("user", "Which city is the capital of France?"),), ("Paris", "Lutetia"), "", 1),
]


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> EnvironmentConfig:
    folder = tmp_path_factory.mktemp("index")
    row = {"id": "0", "contents": '"Gabon"\nIts capital is Libreville.'}
    BM25Retriever.build([json.loads(json.dumps(row))], folder / "index")
    return EnvironmentConfig.model_validate(
        {"kind": "search", "max_turns": 2, "retrieval": {"index": str(folder / "index"), "topk": 1}}
    )


def problems(section: EnvironmentConfig) -> list[str]:
    tokenizer = build_tokenizer()
    stage: Any = SimpleNamespace(
        rollouts=SimpleNamespace(tokenizer=tokenizer),
        tasks=TASKS,
        config=SimpleNamespace(environment=section),
    )
    broken, wrong, _ = fair._problems(section, TASKS, tokenizer)
    return broken + wrong + list(fair._graded(stage))


def all_that_was_read_is_graded(mp: pytest.MonkeyPatch) -> None:
    """verl #6392."""
    real = Episode.completion

    def everything(self: Episode, finished: Any) -> Any:
        text = episode.decode_plain(self.tokenizer, self.context)
        return replace(real(self, finished), text=text)

    mp.setattr(Episode, "completion", everything)


def tags_of_documents_stay(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(search, "neutralise", lambda text: text)


def either_contains_the_other(mp: pytest.MonkeyPatch) -> None:
    """Visual-RFT #176."""
    mp.setattr(
        search, "exact_match", lambda a, targets: a is not None and any(t in a or a in t for t in targets)
    )


def an_empty_answer_is_contained(mp: pytest.MonkeyPatch) -> None:
    """E2, with the parser that lets it pass."""
    mp.setattr(search, "parse_action", lambda t: ("answer", "") if "</answer>" in t else ("invalid", ""))
    mp.setattr(search, "exact_match", lambda a, targets: any(a in t for t in targets))


def answer_in_text(mp: pytest.MonkeyPatch) -> None:
    """verifiers #763."""
    mp.setattr(search, "exact_match", lambda a, targets: a is not None and any(t in a for t in targets))


def the_first_answer_counts(mp: pytest.MonkeyPatch) -> None:
    """Search-R1 #79."""
    real = search.parse_action

    def first(text: str) -> Any:
        _, found, rest = text.partition("<answer>")
        return ("answer", rest.partition("</answer>")[0].strip()) if found else real(text)

    mp.setattr(search, "parse_action", first)


def right_answers_earn_nothing(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(search, "exact_match", lambda a, targets: False)


FOUND: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (all_that_was_read_is_graded, "the environment grades"),
    (tags_of_documents_stay, "the tags of a document"),
    (either_contains_the_other, "is a part of an answer"),
    (an_empty_answer_is_contained, "is an empty answer"),
    (answer_in_text, "is an answer and more"),
    (the_first_answer_counts, "is followed by a wrong answer"),
    (right_answers_earn_nothing, "earns 0, and is right"),
]


def test_the_search_environment_is_fair(section: EnvironmentConfig) -> None:
    assert problems(section) == []


@pytest.mark.parametrize(("plant", "line"), FOUND, ids=[plant.__name__ for plant, _ in FOUND])
def test_a_planted_fault_of_the_environment_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    line: str,
    section: EnvironmentConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    assert any(line in problem for problem in problems(section)), problems(section)


class Grader:
    """An environment of a user that pays for text that contains the answer in a tool's response."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self, bare: bool) -> None:
        self._bare = bare

    async def reset(self, task: Task, seed: int) -> list[Message]:
        self._target = task.targets[0]
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        read = action if self._bare else action.partition("<tool_response>")[2]
        right = self._target in read
        return StepResult("", float(right), True, True, outcome="ok" if right else "wrong")

    async def close(self) -> None: ...


def reader(section: EnvironmentConfig) -> Callable[[], Grader]:
    return lambda: Grader(bare=False)


def lenient(section: EnvironmentConfig) -> Callable[[], Grader]:
    return lambda: Grader(bare=True)


def test_a_forged_observation_must_not_earn_unless_an_answer_needs_no_form() -> None:
    base = EnvironmentConfig.model_validate({"kind": f"{__name__}:reader", "max_turns": 1}).beside(Path.cwd())
    (one, other) = fair._problems(base, TASKS, build_tokenizer())[1]
    assert "is a forged observation" in one and "is a forged observation" in other
    free = base.model_copy(update={"kind": f"{__name__}:lenient"})
    assert fair._problems(free, TASKS, build_tokenizer())[:2] == ([], [])
