"""Tasks and scorers of the real package reasoning-gym, and the example that is built with it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_stppo.base.types import Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.config.file import load
from megatron_stppo.data import tasks
from megatron_stppo.data.demonstrations import Row, encode
from megatron_stppo.environments import choose
from megatron_stppo.environments.base import StepResult
from megatron_stppo.evidence.checks import fair
from tests.environments.playing import played
from tests.rollout.vllm.tiny import build_tokenizer

package = pytest.importorskip("reasoning_gym", reason="needs megatron-stppo[reasoning-gym]")
EXAMPLE = Path(__file__).parent
sys.path.insert(0, str(EXAMPLE.parent / "quickstart"))
import build_sums  # noqa: E402
import gym_tasks  # noqa: E402
import sums  # noqa: E402
from gym_tasks import RETRY, task_rows  # noqa: E402

del sys.path[0]
SECTION = EnvironmentConfig(kind="gym_tasks:factory", max_turns=2).beside(EXAMPLE)


def written(folder: Path, *rows: dict[str, Any]) -> tuple[Task, ...]:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tasks.read(path)


def play(task: Task, *actions: str) -> list[StepResult]:
    return played(choose.factory(SECTION)(), task, *actions)


@pytest.fixture
def seven(tmp_path: Path) -> Task:
    """A sum of two digits, with the answer 7."""
    given = task_rows("chain_sum", "train", 200, 0, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    return next(task for task in written(tmp_path, *given) if task.targets == ("7",))


def test_a_right_first_answer_has_the_whole_reward(seven: Task) -> None:
    (result,) = play(seven, "so it is <answer> 7.0</answer>")  # the package's scorer compares numbers
    assert (result.done, result.outcome, result.reward) == (True, "ok", 1.0)
    assert (result.detail, result.metrics) == (" 7.0", {"score": 1.0, "answers": 1})


def test_a_second_answer_has_half_the_reward(seven: Task) -> None:
    first, second = play(seven, "<answer>8</answer>", "<answer>7</answer>")
    assert (first.observation, first.reward, first.done, first.valid) == (RETRY, 0.0, False, True)
    assert (second.outcome, second.reward, second.metrics["answers"]) == ("ok", 0.5, 2)


def test_a_turn_without_an_answer_is_not_valid_and_counts(seven: Task) -> None:
    for action in ("7", "<answer>", "<answer> </answer>", f"<answer>{'7' * 600}</answer>", "x" * 10**6):
        first, last = play(seven, action, "<answer>70</answer>")
        assert (first.done, first.valid) == (False, False)
        # the package gives 1/2 for "70", which contains the right answer; it is the second answer
        assert (last.outcome, last.reward, last.metrics["score"]) == ("wrong", 0.25, 0.5)


@pytest.mark.parametrize("credit", [1.0, 0.5])
def test_verify_finds_it_fair_unless_right_answers_earn_less(
    credit: float, seven: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = package.get_score_answer_fn("chain_sum")
    monkeypatch.setattr(package, "get_score_answer_fn", lambda _: lambda *of: credit * score(*of))
    broken, unfair, episodes = fair._problems(SECTION, [seven], build_tokenizer())
    assert broken == [] and episodes > 10
    assert [line.endswith("and is right") for line in unfair] == [True] * (credit < 1), unfair


@pytest.mark.parametrize(
    "text", ["1e999999999999", "__import__('os').abort()", "9" * 512, "\ud800", "7" * 99]
)
def test_text_that_is_no_answer_costs_neither_time_nor_the_process(seven: Task, text: str) -> None:
    assert play(seven, f"<answer>{text}</answer>")[0].done is False


def test_every_accepted_dataset_scores_its_own_answers_after_a_round_trip_through_a_file(
    tmp_path: Path,
) -> None:
    names = gym_tasks.accepted()
    assert len(names) >= 40 and {"chain_sum", "letter_counting", "mini_sudoku"} <= set(names)
    for name in names:
        for task in written(tmp_path, *task_rows(name, "train", 1, 0)):
            score = package.get_score_answer_fn(name)
            entry = {"answer": task.targets[0], "metadata": task.extra["reasoning_gym"]["metadata"]}
            assert score(task.targets[0], entry) == 1.0, name


def test_a_scorer_that_may_evaluate_the_models_text_is_refused() -> None:
    for name in ("binary_matrix", "countdown", "polynomial_multiplication", "coin_flip"):
        with pytest.raises(
            ConfigError, match=rf"^dataset={name}: its scorer may evaluate the model's text; "
        ):
            next(task_rows(name, "train", 1, 0))


def test_wrong_names_and_settings_give_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^dataset=chainsum: .*did you mean dataset=chain_sum\?$"):
        next(task_rows("chainsum", "train", 1, 0))
    with pytest.raises(ConfigError, match=r"^dataset=chain_sum: .*min_trems.*; correct its settings$"):
        next(task_rows("chain_sum", "train", 1, 0, min_trems=2))
    with pytest.raises(ConfigError, match=r"^dataset=chain_sum: .*; correct its settings$"):
        next(task_rows("chain_sum", "train", 1, 0, min_terms=9, max_terms=2))


def test_a_row_of_other_data_names_what_is_missing(seven: Task, tmp_path: Path) -> None:
    row = next(task_rows("chain_sum", "train", 1, 0))
    del row["extra_info"]["reasoning_gym"]
    with pytest.raises(ConfigError, match=r"row 0: extra_info.reasoning_gym is missing; write the data with"):
        play(written(tmp_path, row)[0])


def test_without_the_package_one_line_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"; pip install reasoning-gym$"):
        choose.factory(SECTION)


def test_the_example_is_built_from_disjoint_tasks_and_right_workings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_sums, "SIZES", {"train": 100, "evaluate": 50})
    build_sums.main(["--output", str(tmp_path), "--tokens", "40000"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    config = load(EXAMPLE / "config.yaml")
    train, held_out = (tasks.read(tmp_path / f"{name}.jsonl") for name in ("train", "evaluate"))
    scripts = [json.loads(line) for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()]
    asked = [{task.prompt[0].content for task in train}, {task.prompt[0].content for task in held_out}]
    asked.append({row["prompt"][0]["content"] for row in scripts})
    assert not asked[0] & asked[1] | asked[1] & asked[2] | asked[0] & asked[2]

    for task in held_out:
        working = sums.working(task.prompt[0].content)
        (result,) = play(task, working)
        assert result.reward == 1.0
        lengths = len(tokenizer(working)["input_ids"]), len(tokenizer(task.prompt[0].content)["input_ids"])
        assert 25 <= lengths[0] <= config.rollout.max_turn_tokens
        assert lengths[1] + 8 <= config.rollout.max_prompt_tokens
    assert not [token for token in tokenizer.get_vocab() if re.search(r"\d\d", token)]
    assert len(tokenizer(RETRY)["input_ids"]) <= config.environment.max_observation_tokens
    assert len(encode([Row.model_validate(scripts[0])], tokenizer)[0]) > 40
    kinds = [[segment["kind"] for segment in row["segments"]] for row in scripts if row["stage"] == "policy"]
    assert ["turn", "observation", "turn"] in kinds and ["turn"] in kinds


def test_a_row_depends_on_the_seed_plus_its_index_as_the_docstring_says() -> None:
    first, second = (list(task_rows("chain_sum", "train", 3, seed)) for seed in (1, 2))
    assert [row["prompt"] for row in first[1:]] == [row["prompt"] for row in second[:2]]
