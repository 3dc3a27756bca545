import sys
from types import ModuleType

import pytest

from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments import choose


class Counter:
    def __init__(self, turns: int) -> None:
        self.turns = turns


@pytest.fixture
def own(monkeypatch):
    module = ModuleType("own_environment")
    module.factory = lambda section: lambda: Counter(section.max_turns)
    monkeypatch.setitem(sys.modules, "own_environment", module)


@pytest.mark.parametrize("kind", ["own_environment:factory", "own_environment"])
def test_an_own_environment_is_made_from_its_section(own, kind):
    make = choose.factory(EnvironmentConfig(kind=kind, max_turns=7))
    first, second = make(), make()
    assert (first.turns, second.turns) == (7, 7)
    assert first is not second


@pytest.mark.parametrize(
    "kind",
    ["serach", "own_environment:missing", "a.b.c:make", ":make", ".own:make", "os:sep", "builtins:id"],
)
def test_what_cannot_be_imported_is_one_line(own, kind):
    with pytest.raises(ConfigError, match=rf"environment\.kind={kind}: .*; give search, or MODULE:FACTORY"):
        choose.factory(EnvironmentConfig(kind=kind))
