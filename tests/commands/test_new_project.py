"""The project that `init` writes can train, is installed with the package, and agrees with the documents."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_stppo
from megatron_stppo.commands.environments import AGENT, MAKE_MODEL, TEMPLATE, write_project
from megatron_stppo.config import ConfigError
from tests.forking import stand_in

ROOT = Path(__file__).parents[2]
AGENT_FILES = ["README.md", "agent.py", "config.yaml", "demonstrations.py", "make_model.py"]
AGENT_FILES += ["test_agent.py", "train.jsonl"]
FILES = ["README.md", "config.yaml", "guess.py", "make_model.py", "test_environment.py", "train.jsonl"]


def run(folder: Path, *command: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    given = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, *command], cwd=folder, env=given, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_a_new_project_makes_its_model_passes_its_tests_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my-project"
    said = run(tmp_path, "-m", "megatron_stppo", "init", str(folder)).stdout
    assert sorted(path.name for path in folder.iterdir()) == FILES
    steps = re.findall(r"^    (.*)$", said, re.MULTILINE)
    assert steps == [
        f"cd {folder}",
        "python make_model.py",
        "pytest",
        "megatron-stppo train config.yaml",
    ]

    run(folder, "make_model.py")
    assert "4 passed" in run(folder, "-m", "pytest", "-q").stdout
    monkeypatch.chdir(folder)  # the same command, through the Python interface
    trained = megatron_stppo.train("config.yaml", ["run.iterations=2"])
    printed = capsys.readouterr().out
    assert "st_ppo 2/2: reward" in printed and "NUMA" not in printed, "vLLM binds memory, and warns of it"
    table = megatron_stppo.read_run(trained)
    assert table.metrics.index.tolist() == [1, 2] and len(table.episodes) == 2 * 80
    assert all(1 < mean <= 3 for mean in table.metrics["environment/guesses"])
    assert table.episodes.text.str.contains("higher|lower").any()
    rows = [json.loads(row) for row in (folder / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert all(row["outcome/ok"] + row["outcome/wrong"] == 80 for row in rows), "no episode failed"
    assert all(0 < row["rollout/valid_action_rate"] < 1 for row in rows), (
        "some actions are digits, and some are not"
    )
    assert (folder / "runs/first/report.html").exists()


def test_a_new_agent_passes_its_tests_and_learns_to_call_its_tools(tmp_path: Path) -> None:
    """The cold start plays the agent at its end. That a run can train on its episodes is tested elsewhere."""
    folder = tmp_path / "my-agent"
    run(tmp_path, "-m", "megatron_stppo", "init", "--agent", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == AGENT_FILES
    rows = folder / "demonstrations.py"  # fewer than the project has: how calls are written is learned first
    rows.write_text(rows.read_text().replace("ROWS = 2_000", "ROWS = 300"))
    played = run(folder, "-m", "make_model", python=stand_in.python())
    assert "3 passed" in run(folder, "-m", "pytest", "-q").stdout
    said = re.search(r"exact match ([0-9.]+), valid actions ([0-9.]+)", played.stdout + played.stderr)
    assert said and 0 < float(said[1]) < 0.9 and float(said[2]) > 0.9, "its calls are read, at random boxes"


def test_a_folder_that_is_not_empty_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match=rf"FOLDER={target}: is not an empty folder; name a new one"):
            write_project(target)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_installed_package_has_the_whole_template(tmp_path: Path) -> None:
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "megatron_stppo" / "py.typed").exists()
    for source, names in (
        (TEMPLATE, FILES),
        (AGENT, [name for name in AGENT_FILES if name != MAKE_MODEL.name]),
    ):
        built = (tmp_path / "megatron_stppo" / "commands" / "new_project" / source.name).iterdir()
        expected = {name: (source / name).read_text() for name in names}
        assert {path.name: path.read_text() for path in built} == expected


def test_the_environment_that_the_docs_show_is_the_one_of_the_template() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL)
    assert block is not None
    assert block[1] == (TEMPLATE / "guess.py").read_text()
