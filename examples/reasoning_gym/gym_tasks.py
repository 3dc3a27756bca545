"""The environment: tasks and scorers of the package reasoning-gym, `environment.kind: gym_tasks:factory`.

`task_rows` makes the rows of a data file. A row contains everything that the scorer needs, so training does
not generate a task again. The policy writes <answer>answer</answer>, with any text before it. A wrong answer
may be corrected until the episode has had `environment.max_turns` turns. The reward is the score of the last
answer divided by the number of turns.

Some scorers of the package pass the answer to eval, to sympy's parser, or to arithmetic without a limit. The
answer is text of the model, so only scorers that compare text and numbers are accepted.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from megatron_stppo.base.printing import did_you_mean, one_line
from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments.answers import MAX_ACTION, MAX_ANSWER, inside_last
from megatron_stppo.environments.base import StepResult

KIND, WRITER = "reasoning_gym", "gym_tasks.task_rows"
INSTRUCTION = "\nThink step by step, then write <answer>your answer</answer>."
RETRY = "\n\nThat answer is wrong. Try again.\n\n"
CORRECTION = "\n\nThat has no answer. Write <answer>your answer</answer>, then stop.\n\n"
# Datasets with a scorer of their own that was read (0.1.25) and only compares text and numbers. The default
# scorer of the package does too; the datasets that use it need no row here.
REVIEWED = frozenset(
    {
        "chain_sum",
        "circuit_logic",
        "family_relationships",
        "mini_sudoku",
        "needle_haystack",
        "number_format",
        "path_star",
        "products",
        "self_reference",
        "sentence_reordering",
        "spell_backward",
        "sudoku",
        "word_sorting",
        "zebra_puzzles",
    }
)
Score = Callable[[str, dict[str, Any]], float]


def task_rows(
    dataset: str, split: str, size: int, seed: int, instruction: str = INSTRUCTION, **settings: Any
) -> Iterator[dict[str, Any]]:
    """Yield `size` rows of a data file, in the verl schema. The same arguments give the same rows.

    Most datasets make row i from seed + i, so the seeds of two splits must differ by more than their sizes.

    dataset, settings: the package's name of the dataset, and the fields of its configuration.
    instruction: text after the question. Raises ConfigError for a dataset or a setting that cannot be used.
    Example: next(task_rows("chain_sum", "train", 1, 0, min_terms=3)).
    """
    package = _package()
    _check(package, dataset, "dataset")
    try:
        entries = package.create_dataset(dataset, seed=seed, size=size, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"dataset={dataset}: {one_line(str(error))}; correct its settings") from None
    for index in range(size):
        entry = entries[index]
        yield {
            "data_source": f"{KIND}/{dataset}",
            "prompt": [{"role": "user", "content": entry["question"] + instruction}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [entry["answer"]]}},
            "extra_info": {
                "split": split,
                "index": index,
                KIND: {"dataset": dataset, "metadata": entry["metadata"]},
            },
        }


class ReasoningGymEnvironment:
    """One episode: turns until an answer is right or `max_turns` were taken.

    Example: reset(task), then step("2 + 3 = 5 <answer>5</answer>").
    """

    stop_strings = ("</answer>",)

    def __init__(self, scorer: Callable[[str], Score], max_turns: int) -> None:
        """scorer: returns the package's scorer of a dataset. Raises ConfigError if it cannot be used."""
        self._scorer, self._max_turns = scorer, max_turns
        self._turns = 0

    async def reset(self, task: Task, seed: int) -> list[Message]:
        """Return the task's prompt. Raises ConfigError for a row that task_rows has not written."""
        row = task.extra.get(KIND)
        if not isinstance(row, dict) or not {"dataset", "metadata"} <= row.keys():
            raise ConfigError(
                f"{task.data_source} row {task.index}: extra_info.{KIND} is missing; write the data with "
                f"{WRITER}"
            )
        self._score = self._scorer(str(row["dataset"]))
        self._entry = {"answer": task.targets[0], "metadata": row["metadata"]}
        self._turns = 0
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        answer = inside_last(action, "answer") if len(action) <= MAX_ACTION else None
        valid = answer is not None and 0 < len(answer.strip()) <= MAX_ANSWER
        score = float(self._score(answer.strip(), self._entry)) if valid and answer is not None else 0.0
        right = score >= 1
        if not right and self._turns < self._max_turns:
            return StepResult(RETRY if valid else CORRECTION, 0.0, done=False, valid=valid)
        return StepResult(
            observation="",
            reward=score / self._turns,
            done=True,
            valid=valid,
            outcome="ok" if right else "wrong",
            detail=one_line(answer or ""),
            metrics={"score": score, "answers": self._turns},
        )

    async def close(self) -> None: ...


def factory(section: EnvironmentConfig) -> Callable[[], ReasoningGymEnvironment]:
    """Return a function that makes one environment per episode.

    Raises ConfigError if the package is not installed.
    """
    package = _package()

    @functools.cache
    def scorer(dataset: str) -> Score:
        _check(package, dataset, f"extra_info.{KIND}.dataset")
        score: Score = package.get_score_answer_fn(dataset)
        return score

    return lambda: ReasoningGymEnvironment(scorer, section.max_turns)


def accepted() -> list[str]:
    """Return the names of the datasets that can be used, sorted. Raises ConfigError without the package."""
    package = _package()
    return sorted(name for name in package.factory.DATASETS if _is_accepted(package, name))


def _package() -> ModuleType:
    try:
        with warnings.catch_warnings():  # of cellpylib's source text, which it imports
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module("reasoning_gym")  # optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"gym_tasks: the package reasoning-gym cannot be imported ({error}); pip install reasoning-gym"
        ) from None


def _is_accepted(package: ModuleType, dataset: str) -> bool:
    scorer = package.factory.DATASETS[dataset][0].score_answer
    return dataset in REVIEWED or scorer is package.dataset.ProceduralDataset.score_answer


def _check(package: ModuleType, dataset: str, field: str) -> None:
    """Raise ConfigError unless the package has the dataset, and its scorer is accepted."""
    known = package.factory.DATASETS
    if dataset not in known:
        remedy = did_you_mean(dataset, known, f"{field}={{}}") or "see reasoning_gym.factory.DATASETS"
        raise ConfigError(f"{field}={dataset}: reasoning-gym has no such dataset; {remedy}")
    if not _is_accepted(package, dataset):
        raise ConfigError(
            f"{field}={dataset}: its scorer may evaluate the model's text; choose from "
            f"{', '.join(accepted())}"
        )
