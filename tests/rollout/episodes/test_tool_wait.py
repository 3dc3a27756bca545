from __future__ import annotations

import asyncio
import logging
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_stppo.base.errors import Requeue, ToolsStayAway
from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import Config, ConfigError, EnvironmentConfig
from megatron_stppo.environments import choose
from megatron_stppo.environments.base import StepResult, ToolAway
from megatron_stppo.rollout.episodes import collect, environment_host
from megatron_stppo.rollout.episodes.collect import open_together
from megatron_stppo.rollout.episodes.environment_host import EnvironmentHost, ToolWait
from tests.ranks import run_ranks
from tests.rollout.vllm.tiny import Game, task


class Asking(Game):
    """An environment whose tool is unavailable until `Asking.back`, on the monotonic clock."""

    back = made = 0.0

    def __init__(self) -> None:
        super().__init__()
        Asking.made += 1

    async def reset(self, task: Task, seed: int) -> list[Message]:
        self._ask()
        return await super().reset(task, seed)

    async def step(self, action: str) -> StepResult:
        self._ask()
        if action == "refused":
            raise ValueError("the tool refuses this action")
        return StepResult(action, 0.0, False, True, True)

    def _ask(self) -> None:
        if time.monotonic() < Asking.back:
            raise ToolAway("tool: connection refused")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_host, "FIRST", 0.05)
    monkeypatch.setattr(environment_host, "LONGEST", 0.1)


def test_calls_are_repeated_until_the_tool_answers_and_the_wait_prints_two_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The wait of 0.5 s is longer than the deadline of a call, 0.2 s."""
    Asking.back, Asking.made = time.monotonic() + 0.5, 0
    tools = ToolWait(60, "rank 4: ")
    with (
        caplog.at_level(logging.WARNING),
        EnvironmentHost(Asking, concurrency=8, deadline=0.2, tools=tools) as host,
    ):
        for index in range(3):
            host.reset(index, task(index), seed=0)
        assert [answer.messages for answer in host.take(3)] == [task(index).prompt for index in range(3)]
        Asking.back = time.monotonic() + 0.3
        for index, action in enumerate(("a", "refused", "b")):
            host.step(index, action)
        first, refused, last = host.take(3)
    assert first.result and last.result and last.result.observation == "b"
    assert refused.result and refused.result.outcome == "error"
    assert refused.result.detail == "ValueError: the tool refuses this action"
    assert Asking.made == 3, "an attempt creates no new environment"
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    begins, ends = (
        "rank 4: tools do not answer: tool: connection refused; waiting for up to ",
        "rank 4: tools answer",
    )
    assert [line.startswith((begins, ends)[n % 2]) for n, line in enumerate(lines)] == [True] * 4


def test_a_rollout_gives_up_when_its_total_wait_exceeds_tool_wait() -> None:
    Asking.back = time.monotonic() + 0.4
    with EnvironmentHost(Asking, concurrency=8, deadline=5, tools=ToolWait(0.6)) as host:
        host.reset(0, task(0), seed=0)
        host.take(1)
        Asking.back = time.monotonic() + 60
        host.step(0, "a")
        start = time.monotonic()
        with pytest.raises(ToolsStayAway) as raised:
            host.take(1)
    assert time.monotonic() - start < 0.5
    assert str(raised.value) == (
        "tools did not answer for 0.6 s (environment.tool_wait): tool: connection refused"
    )
    assert isinstance(raised.value, Requeue), "exit code 85"


def test_one_call_that_answers_ends_the_wait_of_all() -> None:
    """If one call succeeds after 0.3 s, the wait is 0.3 s, even if another call fails for longer."""
    tools, began = ToolWait(0.7), time.monotonic()

    async def answering(at: float) -> float:
        if time.monotonic() - began < at:
            raise ToolAway("busy")
        return at

    async def both() -> list[float]:
        return await asyncio.gather(*(tools.call(lambda at=at: answering(at)) for at in (0.3, 0.6)))

    assert asyncio.run(both()) == [0.3, 0.6]


def away_on_the_second_rank(folder: str) -> list[str]:
    """Return what open_together raises on a rank, in a new run, a resumed one, and if the tool returns."""
    import torch.distributed as dist

    collect.LONGEST = 0.1
    sys.path.insert(0, folder)
    import os

    os.environ["PYTHONPATH"] = folder
    import away

    said = []
    for resume, back, wait in ((False, 60.0, 0.5), (True, 60.0, 0.5), (True, 0.3, 30.0)):
        config = EnvironmentConfig(kind="away:factory", tool_wait=wait)
        dist.barrier()
        away.back = time.monotonic() + (back if dist.get_rank() else 0)
        try:
            said.append(str(open_together(partial(choose.factory, config), config, resume)()))
        except (ConfigError, ToolsStayAway) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_all_ranks_wait_for_a_tool_that_one_rank_cannot_reach_only_when_resuming(tmp_path: Path) -> None:
    (tmp_path / "away.py").write_text(
        "import time\nfrom megatron_stppo.environments.base import ToolAway\nback = 0.0\n"
        "def factory(section):\n    if time.monotonic() < back:\n        raise ToolAway('down')\n"
        "    return lambda: 'played'\n"
    )
    first, second = run_ranks(away_on_the_second_rank, 2, str(tmp_path))
    assert (
        first
        == second
        == [
            "ConfigError: environment.kind=away:factory: down; start its tools",
            "ToolsStayAway: tools did not answer for 0.5 s (environment.tool_wait): down",
            "played",
        ]
    )


def missing_on_the_second_rank(folder: str) -> str:
    """Return what open_together raises on a rank, where a file of the environment is on one node only."""
    import os

    import torch.distributed as dist

    sys.path.insert(0, folder)
    os.environ |= {"PYTHONPATH": folder, "BOARD": "" if dist.get_rank() else "board"}
    with pytest.raises(ConfigError) as raised:
        config = EnvironmentConfig(kind="board:factory")
        open_together(partial(choose.factory, config), config, False)
    return str(raised.value)


def test_all_ranks_raise_the_error_of_a_rank_that_cannot_make_its_environment(tmp_path: Path) -> None:
    (tmp_path / "board.py").write_text(
        "import os\ndef factory(section):\n    if not os.environ['BOARD']:\n"
        "        raise FileNotFoundError('board')\n    return lambda: None\n"
    )
    first, second = run_ranks(missing_on_the_second_rank, 2, str(tmp_path))
    assert first == second and first.startswith(
        "environment.kind=board:factory: board.py line 4: FileNotFoundError: board; give "
    )


def test_tool_wait_is_added_to_deadlines_if_a_tool_can_be_unavailable() -> None:
    given = {"model": {"path": "m"}, "deadlines": {"rollout": 20, "score": 30}}
    embedded = Config.model_validate(given)
    own = Config.model_validate(given | {"environment": {"kind": "own:factory", "tool_wait": 600}})
    limits = [(c.deadline_by_phase["rollout"], c.deadline_by_phase["score"]) for c in (embedded, own)]
    assert limits == [(20, 30), (620, 30)]
    assert own.timeout.total_seconds() == 7200 + 600 + 60


@pytest.mark.parametrize(
    "update, max_staleness, expected", [("recompute", 8, 30), ("complete", 1, 50), ("complete", 8, 190)]
)
def test_a_reshard_that_waits_for_the_episodes_of_rollouts_has_their_time_too(
    update: str, max_staleness: int, expected: float
) -> None:
    """A rollout has 20 s, and a reshard that waits for nothing 30 s."""
    given = {"model": {"path": "m"}, "deadlines": {"rollout": 20, "reshard": 30}}
    serving = {"replicas": 1, "update": update, "max_staleness": max_staleness}
    config = Config.model_validate(given | {"serving": serving})
    assert config.deadline_by_phase["reshard"] == expected
    assert config.timeout.total_seconds() >= expected + 60
