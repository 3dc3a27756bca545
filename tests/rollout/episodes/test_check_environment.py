"""check-environment prints one line per defect, and no line for a correct environment."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_stppo import __main__ as command_line
from megatron_stppo.rollout.episodes import environment_host

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "model"

MODULE = """
import asyncio, math, random, time
from megatron_stppo.environments.base import StepResult

WRONG = StepResult("", 0.0, True, True, False, "wrong")


class Right:
    stop_strings = ("</answer>",)

    async def reset(self, task, seed):
        self._target, self._turns = task.targets[0], 0
        return list(task.prompt)

    async def step(self, action):
        self._turns += 1
        if self._target in action:
            return StepResult("", 1.0, True, True, False, "ok", action[:9])
        return WRONG if self._turns > 1 else StepResult("again", 0.0, False, True, False)

    async def close(self): ...


def right(section):
    return Right


def broken(method):
    return lambda section: type("Broken", (Right,), {"step": method})


def returning(value):
    async def step(self, action):
        return value

    return broken(step)


nothing = returning(None)
lost = returning(WRONG)
pair = returning(("", 1.0))
won = returning(StepResult("", 1.0, True, True, False, "won"))
nan = returning(StepResult("", math.nan, True, True, False, "ok"))
endless = returning(StepResult("again", 0.0, False, True, False))
plain = broken(lambda self, action: WRONG)


async def _blocking(self, action):
    time.sleep(0.7)
    return WRONG


async def _hanging(self, action):
    time.sleep(60)


async def _slow(self, action):
    await asyncio.sleep(60)


async def _raising(self, action):
    raise KeyError("board")


async def _random(self, action):
    return StepResult("", random.random(), True, True, False, "ok")


blocking, hanging, slow, raising = broken(_blocking), broken(_hanging), broken(_slow), broken(_raising)
luck = broken(_random)


class Counting(Right):
    count = 0

    async def step(self, action):
        Counting.count += 1
        return StepResult(f"call {Counting.count}", 0.0, True, True, False, "wrong")


def shared(section):
    return Counting


one = Right()


def same(section):
    return lambda: one


class Text(Right):
    stop_strings = "</answer>"


def text(section):
    return Text


class Needs(Right):
    def __init__(self, section): ...


def needs(section):
    return Needs


def fails(section):
    raise FileNotFoundError("board.json")
"""
Check = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a function that runs the command on an environment of MODULE and returns (exit code, lines)."""
    (tmp_path / "checked_environments.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "checked_environments", raising=False)
    (tmp_path / "run.yaml").write_text("model: {path: m}\nenvironment: {max_turns: 2, deadline: 0.3}\n")

    def run(name: str, *arguments: str, settings: bool = True) -> tuple[int, list[str]]:
        given = (str(tmp_path / "run.yaml"),) if settings else ()
        command = ["check-environment", f"checked_environments:{name}", *given, *arguments]
        monkeypatch.setattr(sys, "argv", ["megatron-stppo", *command])
        code, shown = command_line.run(), capsys.readouterr()
        return code, (shown.out + shown.err).splitlines()

    return run


def test_a_correct_environment_is_reported_without_problems(check: Check) -> None:
    code, (line,) = check("right")
    assert code == 0
    assert re.fullmatch(r"no problem in \d+ episodes, \d+ turns: \d+ ok, \d+ wrong", line)


def test_given_turns_are_played_in_one_episode_and_shown(check: Check) -> None:
    turns = ("no</answer> and", "--action=42", "more")
    code, lines = check("right", f"model.path={QUICKSTART}", "--play", *turns)
    assert code == 0
    assert lines[:6] == [
        "user: 'What is the answer?'",
        "turn: 'no</answer>', cut from 'no</answer> and'",
        "observation: 'again' (reward 0.0, valid True, tool_calls 0)",
        "turn: '--action=42'",
        "observation: '' (reward 1.0, valid True, tool_calls 0)",
        "end: ok, detail '--action=', reward 1 in all; turns that were not played: 1",
    ]
    assert re.fullmatch(r"what the model reads and writes, \d+ tokens:", lines[6])
    assert lines[-1] == "no</answer>again--action=42<|im_end|>"
    code, lines = check("raising", "--play", "a", settings=False)
    assert (code, lines[1]) == (2, "turn: 'a'") and "reward 0 in all" in lines[2]
    assert (
        lines[-1] == "megatron-stppo: Broken.step(): raised KeyError: 'board'; the episode ends as an error"
    )


def test_every_task_is_played_with_its_own_answer(check: Check, tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "t",
            "prompt": [{"role": "user", "content": "Which?"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [answer]}},
            "extra_info": {"split": "train", "index": number},
        }
        for number, answer in enumerate(("one", "two", "three", "four"))
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, (line,) = check("right", f"data.train={tmp_path / 'tasks.jsonl'}")
    assert code == 0 and re.search(r" [1-9]\d* ok, ", line)
    code, (line,) = check("lost")
    assert code == 0 and line.endswith(" wrong; none was ok: give right actions with --action")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "Broken.step(): returned None; return an environments.base.StepResult"),
        ("pair", "Broken.step(): returned ('', 1.0); return an environments.base.StepResult"),
        ("won", "outcome 'won'; choose from ok, wrong, truncated, error, timeout"),
        ("nan", "Broken.step(): returned reward nan; return a finite number"),
        (
            "endless",
            "Broken.step(): not done after 3 turns (environment.max_turns=2 plus one for the answer)",
        ),
        ("plain", "Broken.step(): cannot be awaited; write `async def step`"),
        ("raising", "Broken.step(): raised KeyError: 'board'"),
        ("shared", "Counting: the same task, seed and actions gave a different result"),
        ("luck", "Broken: the same task, seed and actions gave a different result"),
        ("same", "the factory's function returned the same object twice; return a new one for every episode"),
        ("text", "Text: stop_strings '</answer>'; give a tuple"),
        ("needs", "making an episode's environment: raised TypeError: "),
        ("fails", "FileNotFoundError: board.json"),
        ("absent", "has no attribute 'absent'; give search, agent, or M"),
    ],
)
def test_a_defect_of_an_environment_gives_one_line_and_exit_code_2(
    check: Check, name: str, problem: str
) -> None:
    code, lines = check(name)
    assert code == 2
    assert all(line.startswith("megatron-stppo: ") for line in lines)
    assert [line for line in lines if problem in line], lines


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "blocking",
            r"Broken.step\(\): blocked the event loop for \S+ s "
            r"\(checked_environments.py:\d+ in _blocking\), and",
        ),
        (
            "hanging",
            r"Broken.step\(\): an environment call has blocked the event loop for \d+ s "
            r"\(checked_environments.py:\d+ in _hanging\); async code must await",
        ),
        ("slow", r"Broken.step\(\): no answer within 0.3 s \(environment.deadline\); answer sooner"),
    ],
)
def test_a_call_that_takes_too_long_is_named(
    check: Check, name: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_host, "PATIENCE", 1.0)
    code, lines = check(name, "--action", "hello")
    assert code == 2 and [line for line in lines if re.search(problem, line)], lines
