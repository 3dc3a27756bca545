"""Games of the real package textworld, played with scripts: the way, mistakes and hostile text; the build."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_stppo.base.types import Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.config.file import load
from megatron_stppo.data import tasks
from megatron_stppo.environments import choose
from megatron_stppo.environments.base import StepResult
from megatron_stppo.rollout.episodes.check_environment import check
from tests.environments.playing import played

pytest.importorskip("textworld", reason="needs megatron-stppo[textworld]")
EXAMPLE = Path(__file__).parent
import build_textworld  # noqa: E402
import make_games  # noqa: E402
import text_games  # noqa: E402

for folder in (EXAMPLE, EXAMPLE.parent / "quickstart"):  # other tests must not see the modules in them
    sys.path.remove(str(folder))
SECTION, DENSE = (
    EnvironmentConfig(kind=f"text_games:{name}", max_turns=10).beside(EXAMPLE)
    for name in ("factory", "quest_steps")
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built example with one game in each split, and the file of a cooking game."""
    folder = tmp_path_factory.mktemp("textworld")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_textworld, "SIZES", {"train": 1, "evaluate": 1})
        build_textworld.main(["--output", str(folder), "--tokens", "3000"])
    cooking = make_games.compiled(folder, "train", "cooking", 2, 1, seed=0)
    rows = make_games.task_rows(cooking, "train", make_games.INSTRUCTION)
    make_games.write_rows(folder / "cooking.jsonl", rows)
    return folder


@pytest.fixture
def coin(built: Path) -> Task:
    return tasks.read(built / "train.jsonl")[0]


@pytest.fixture
def cooking(built: Path) -> Task:
    return tasks.read(built / "cooking.jsonl")[0]


def way(task: Task) -> list[str]:
    return [command(text) for text in task.targets[0].split("\n")]


def command(text: str) -> str:
    return f"<command> {text}</command>"


def play(task: Task, *actions: str, section: EnvironmentConfig = SECTION) -> list[StepResult]:
    return played(choose.factory(section)(), task, *actions)


def test_the_packages_own_way_wins_and_every_room_is_read(coin: Task, cooking: Task) -> None:
    assert coin.prompt[0].content.startswith("-= ") and "There is a" not in coin.prompt[0].content[:9]
    for task in (coin, cooking):
        results = play(task, *way(task))
        assert [result.reward for result in results] == [0.0] * (len(results) - 1) + [1.0]
        assert (results[-1].outcome, results[-1].metrics["score"]) == ("ok", 1.0)
        assert all(result.valid for result in results)
    rooms = [result.observation for result in play(coin, *way(coin)[:-1])]
    assert all(room.startswith("\n\n-= ") and room.endswith("\n\n") for room in rooms)
    assert "coin" in rooms[-1] and not any("coin" in room or ">" in room for room in rooms[:-1])
    assert "cookbook" in cooking.prompt[0].content and "$" not in cooking.prompt[0].content


def test_steps_of_the_quest_earn_equal_parts_which_are_taken_back(coin: Task, cooking: Task) -> None:
    for task in (coin, cooking):
        rewards = [result.reward for result in play(task, *way(task), section=DENSE)]
        assert sum(rewards) == pytest.approx(1.0)
        assert rewards == pytest.approx([0.25] * 4) if task is coin else set(rewards) == {0.0, max(rewards)}
    first = way(coin)[0]
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}
    home = command("go " + back[first.split()[-1].partition("<")[0]])
    rewards = [result.reward for result in play(coin, first, command("look"), home, first, section=DENSE)]
    assert rewards == pytest.approx([0.25, 0.0, -0.25, 0.25])


def test_the_last_turn_ends_the_episode(coin: Task) -> None:
    results = play(coin, *["no command"] * 4 + [command("look")] * 20)
    assert [result.valid for result in results] == [False] * 4 + [True] * 6
    assert (results[-1].outcome, results[-1].reward, results[-1].metrics["turns"]) == ("truncated", 0.0, 10)
    assert results[0].observation == text_games.REFUSED and len(results) == 10


HOSTILE = (
    *("", "\0", "\ud800", "go", "go " * 30, "x" * 10**6, "９", "go north\nquit", "take coin. quit", "i", "z"),
    *(
        "save",
        "restore",
        "quit",
        "restart",
        "undo",
        "again",
        "script on",
        "transcript",
        "verify",
        "look, save",
    ),
    *("tw-print player id", "tw-extra-infos score", "tw-trace-actions", "go north then save", "actions on"),
    *("purloin coin", "take", "drop coin coin coin", "examine north", "<command>save", "%s%n", "\\"),
)
IN_THE_GRAMMAR = {"go", "go " * 30, "take", "drop coin coin coin", "examine north"}


def test_hostile_commands_reach_no_game_and_the_game_can_still_be_won(
    coin: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where `save` and `script` would write
    section = replace_turns(SECTION, 100)
    results = play(coin, *map(command, HOSTILE), "<command>", *way(coin), section=section)
    assert {text for text, result in zip(HOSTILE, results, strict=False) if result.valid} == IN_THE_GRAMMAR
    assert results[-1].outcome == "ok" and len(results) == len(HOSTILE) + 1 + len(way(coin))
    assert not list(tmp_path.iterdir())


def replace_turns(section: EnvironmentConfig, turns: int) -> EnvironmentConfig:
    return EnvironmentConfig(kind=section.kind, max_turns=turns).beside(EXAMPLE)


def test_64_episodes_in_one_process_share_no_state(coin: Task, cooking: Task) -> None:
    """Half of them go the way, in turn with others of the same game, which stay where they are."""
    make, rooms = choose.factory(SECTION), [task.prompt[0].content for task in (coin, cooking)]
    given = [(make(), task) for task in (coin, cooking) * 32]

    async def all_at_once() -> list[StepResult]:
        ends = []
        for environment, task in given:
            await environment.reset(task, seed=0)
        for turn in range(10):
            for number, (environment, task) in enumerate(given):
                if number % 4 < 2 and turn < len(way(task)):
                    ends.append(await environment.step(way(task)[turn]))
        for number, (environment, _) in enumerate(given):
            if number % 4 >= 2:
                looked = await environment.step(command("look"))
                assert looked.observation.strip() in rooms[number % 2]
            await environment.close()
        return [end for end in ends if end.done]

    assert [end.outcome for end in asyncio.run(all_at_once())] == ["ok"] * 32


def test_wrong_rows_and_a_missing_package_give_one_line(
    coin: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"row 0: extra_info\.textworld\.game is missing; write "):
        play(replace(coin, extra={}), command("look"))
    gone = replace(coin, extra={"textworld": {"game": str(tmp_path / "gone.z8")}})
    with pytest.raises(ConfigError, match=r"gone\.z8: no such game; compile it with make_games\.py"):
        play(gone, command("look"))
    text_games._package.cache_clear()
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(ConfigError, match=r"; pip install textworld$"):
        choose.factory(SECTION)


def test_the_built_files_fit_the_configuration(built: Path, coin: Task) -> None:
    config = load(EXAMPLE / "config.yaml")
    tokenizer = AutoTokenizer.from_pretrained(built / "model", trust_remote_code=False)
    (held_out,) = tasks.read(built / "evaluate.jsonl")
    assert held_out.prompt != coin.prompt and held_out.targets != coin.targets
    demonstrations = (built / "demonstrations.jsonl").read_text(encoding="utf-8")
    texts: dict[str, set[str]] = {"turn": set(), "observation": set()}
    for line in demonstrations.splitlines():
        for segment in json.loads(line)["segments"]:
            texts[segment["kind"]].add(segment["text"])

    def longest(written: Any) -> int:
        return max(len(tokenizer(text)["input_ids"]) for text in written)

    assert longest(texts["turn"]) <= config.rollout.max_turn_tokens
    assert longest(texts["observation"] | {text_games.REFUSED}) <= config.environment.max_observation_tokens
    assert longest([coin.prompt[0].content]) + 8 <= config.rollout.max_prompt_tokens
    assert {command("look"), command("inventory")} < texts["turn"]
    assert all(play(coin, turn)[0].valid for turn in texts["turn"])


def test_scripted_episodes_find_no_problem(coin: Task, cooking: Task) -> None:
    """A busy machine may stop the 10 ms in which a game starts for half a second, which is reported."""
    problems = check(SECTION, [coin, cooking]).problems + check(DENSE, [coin]).problems
    assert [line for line in problems if "blocked the event loop" not in line] == []
