import sys
from pathlib import Path

import pytest

from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments import choose

OWN = """
class Counter:
    def __init__(self, turns):
        self.turns = turns


def factory(section):
    return lambda: Counter(section.max_turns)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_environment.py").write_text(OWN)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "inside.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", ["own_environment:factory", "own_environment", "own_package.inside:factory"])
def test_a_user_environment_is_created_from_its_section(own, kind):
    choose.check(EnvironmentConfig(kind=kind))
    make = choose.factory(EnvironmentConfig(kind=kind, max_turns=7))
    first, second = make(), make()
    assert (first.turns, second.turns) == (7, 7)
    assert first is not second


@pytest.mark.parametrize(
    "kind", ["serach", "own_environment:missing", "a.b.c:make", ":make", ".own:make", "os:sep", "builtins:id"]
)
def test_an_environment_that_cannot_be_imported_gives_a_one_line_error(own, kind):
    with pytest.raises(ConfigError, match=rf"environment\.kind={kind}: .*; give search, agent, or M"):
        choose.factory(EnvironmentConfig(kind=kind))


@pytest.mark.parametrize(
    "kind", ["this:factory", "numpy:array", "here:factory", "../here:factory", "own.here"]
)
def test_a_configuration_cannot_import_modules_that_are_not_on_pythonpath(own, tmp_path, monkeypatch, kind):
    """`this` is a module of the standard library, `here` one in the current folder, which sys.path names."""
    (tmp_path / "current").mkdir()
    Path(tmp_path, "current", "here.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.syspath_prepend(tmp_path / "current")
    before = set(sys.modules)
    for refuses in (choose.check, choose.factory):
        with pytest.raises(ConfigError, match=r"^environment\.kind=.*MODULE:FACTORY, in the folder of "):
            refuses(EnvironmentConfig(kind=kind))
    assert set(sys.modules) == before


def test_a_module_beside_the_configuration_is_found_and_replaces_no_other(tmp_path, monkeypatch):
    """Its folder is the last one of sys.path: `json` stays that of Python, and own_beside is imported."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in (("beside", "from own_helper import factory"), ("helper", OWN)):
        (tmp_path / f"own_{name}.py").write_text(text)
    (tmp_path / "json.py").write_text(OWN)
    section = EnvironmentConfig(kind="own_beside:factory")
    with pytest.raises(ConfigError, match="no allowed folder has this module"):
        choose.check(section)
    choose.check(section.beside(tmp_path))
    assert choose.factory(section.beside(tmp_path))().turns == 4
    assert sys.path[-1] == str(tmp_path)
    with pytest.raises(ConfigError, match=r"Python imports .*json/__init__\.py instead of .*json\.py; r"):
        choose.check(EnvironmentConfig(kind="json:factory").beside(tmp_path))
    for name in ("own_beside", "own_helper"):
        del sys.modules[name]


def test_a_module_of_the_current_folder_does_not_replace_the_one_on_pythonpath(own, tmp_path, monkeypatch):
    """`python -m` and torchrun put the current folder before PYTHONPATH in sys.path."""
    current = tmp_path / "current"
    (current / "own_package").mkdir(parents=True)
    for name in ("own_environment.py", "own_package/__init__.py", "own_package/inside.py"):
        Path(current, name).write_text("raise SystemExit('imported')")
    monkeypatch.chdir(current)
    monkeypatch.syspath_prepend(current)
    for kind in ("own_environment:factory", "own_package.inside:factory"):
        for refuses in (choose.check, choose.factory):
            with pytest.raises(
                ConfigError, match=r"Python imports .*/current/own.*\.py instead of .*; rename"
            ):
                refuses(EnvironmentConfig(kind=kind))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kind": "agent"}, "kind=agent needs either agent or command, and 0 of them are set"),
        ({"kind": "agent", "agent": "a:b", "command": ["c"]}, "and 2 of them are set"),
        ({"agent": "a:b"}, "agent is set with kind=search; set kind=agent, or remove agent"),
        ({"kind": "agent", "agent": "a:b", "reward": "a:c"}, "remove reward"),
    ],
)
def test_an_agent_is_one_function_or_command(given, says):
    with pytest.raises(ValueError, match=says):
        EnvironmentConfig(**given)


def test_an_agent_is_found_on_pythonpath_and_a_command_on_path(own):
    own_agent = EnvironmentConfig(kind="agent", agent="own_environment:factory")
    choose.check(own_agent)
    choose.check(EnvironmentConfig(kind="agent", command=["sh", "-c", "echo 1"]))
    for given, says in (
        ({"agent": "os:system"}, r"environment\.agent=os:system: no allowed folder has this module"),
        ({"command": ["no-such"]}, r"environment\.command=no-such: no such program; give its path"),
    ):
        with pytest.raises(ConfigError, match=says):
            choose.check(EnvironmentConfig(kind="agent", **given))
    with pytest.raises(ConfigError, match="an agent needs a policy"):
        choose.factory(EnvironmentConfig(kind="agent", agent="own_environment:factory"))
