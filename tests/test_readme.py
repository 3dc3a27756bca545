"""What README.md shows must be so."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from megatron_stppo.algorithm.variants import VARIANTS
from megatron_stppo.config import Config
from megatron_stppo.environments.base import Environment
from megatron_stppo.types import Message, Task

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
TASK = Task("numbers", (Message("user", "Guess my number."),), ("7",), "train", 0)


@pytest.fixture
def example(tmp_path: Path) -> ModuleType:
    """The Python block of the section on environments, as a module."""
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    path = tmp_path / "example.py"
    path.write_text(block[1])
    specification = importlib.util.spec_from_file_location("readme_example", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_example_environment_plays_an_episode(example: ModuleType) -> None:
    environment = example.GuessTheNumber(max_turns=4)
    assert isinstance(environment, Environment)

    async def play() -> list[tuple[str, float, bool, bool]]:
        assert await environment.reset(TASK, 0) == [Message("user", "Guess my number.")]
        actions = ["hm", "<answer>3</answer>", "<answer>9</answer>", "<answer>7</answer>"]
        results = [await environment.step(action) for action in actions]
        return [(result.observation.strip(), result.reward, result.valid, result.done) for result in results]

    assert asyncio.run(play()) == [
        ("Answer with <answer>a whole number</answer>.", 0.0, False, False),
        ("Too low.", 0.0, True, False),
        ("Too high.", 0.0, True, False),
        ("", 1.0, True, True),
    ]


def test_the_table_of_presets_is_the_table_of_variants() -> None:
    shared = {"token": "a token", "turn": "a turn", "sequence": "a trajectory"}
    advantage = {"gae": "GAE with a critic", "group": "group-normalised outcome"}
    advantage["group_mean"] = "outcome less its group's mean"
    for name, row in VARIANTS.items():
        on = "off" if row["correction"] == "off" else "on"
        cells = [f"`{name}`", shared[row["segments"]], on, advantage[row["advantage"]]]
        assert f"| {' | '.join(cells)} |" in README


def test_the_sections_named_are_those_of_the_configuration() -> None:
    named = README[README.index("The sections are") : README.index("`megatron:` passes")]
    assert set(re.findall(r"`(\w+)`", named)) == set(Config.model_fields) - {"megatron"}


def test_files_named_exist() -> None:
    root = Path(__file__).parents[1]
    named = re.findall(
        r"`((?:megatron_stppo|tools|tests|examples)/[\w./-]+)`", README + (root / "SECURITY.md").read_text()
    )
    assert not [name for name in named if not (root / name).exists()]
