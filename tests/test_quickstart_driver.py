"""examples/quickstart/run.py skips stages that are done, unless they depend on a changed setting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from megatron_stppo.config import ConfigError
from megatron_stppo.config.file import load

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(QUICKSTART))
    import run

    return run


COLD = "model.path=runs/quickstart/cold-start"  # what --cold-start adds


def keys(driver: ModuleType, *overrides: str) -> dict[str, str]:
    return {
        stage.name: stage.key for stage in driver.plan(load(driver.CONFIG, list(overrides)), list(overrides))
    }


@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("update.actor.lr=1e-4", {"train"}),
        ("evaluate.tasks=7", {"train"}),
        ("cold_start.lr=1e-4", {"cold-start", "train"}),
        ("run.seed=1", {"build", "cold-start", "train"}),
    ],
)
def test_a_changed_setting_redoes_what_depends_on_it(
    driver: ModuleType, override: str, again: set[str]
) -> None:
    before, after = keys(driver, COLD), keys(driver, COLD, override)
    assert {name for name in before if before[name] != after[name]} == again


def test_the_model_of_the_repository_takes_the_place_of_the_cold_start_and_belongs_to_data_of_seed_0(
    driver: ModuleType,
) -> None:
    before, after = keys(driver), keys(driver, "run.seed=1")
    assert list(before) == ["build", "train"]
    assert before["build"] == after["build"] and before["train"] != after["train"]
    assert before["build"] != keys(driver, COLD)["build"]  # it has demonstrations


@pytest.mark.parametrize(
    "name", ["medical_choice", "chain_sums", "key_chain", "asynchronous", "agent", "hosted_agent"]
)
def test_another_example_goes_through_the_same_stages_with_its_own_builder_and_file(
    driver: ModuleType, name: str
) -> None:
    example = driver.EXAMPLES[name]
    has_model = name in ("asynchronous", "agent")
    stages = driver.plan(load(example.config), [], example)
    assert [stage.name for stage in stages] == list(keys(driver, *([] if has_model else [COLD])))
    assert str(example.builder) in stages[0].command
    assert all(str(example.config) in stage.command for stage in stages[1:])
    assert not {stage.key for stage in stages[1:]} & {*keys(driver).values(), *keys(driver, COLD).values()}


def test_the_asynchronous_example_trains_on_the_core_that_its_replica_leaves(driver: ModuleType) -> None:
    example = driver.EXAMPLES["asynchronous"]
    overrides = ["model.path=runs/quickstart-async/cold-start"]
    ranks = [
        next((word for word in stage.command if word.startswith("--nproc-per-node")), "")
        for stage in driver.plan(load(example.config, overrides), overrides, example)
    ]
    assert ranks == ["", "--nproc-per-node=2", "--nproc-per-node=1"]


def test_a_run_without_evaluations_is_refused_because_its_summary_is_empty(driver: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"run\.evaluate_every=0: the summary compares evaluations"):
        keys(driver, "run.evaluate_every=0")


def test_the_agent_is_trained_with_the_settings_of_the_built_in_environment(driver: ModuleType) -> None:
    file = driver.EXAMPLES["agent"].config
    text = file.read_text().replace("runs/quickstart-agent/", "runs/quickstart/")
    ours, built_in = (yaml.safe_load(text), yaml.safe_load(driver.CONFIG.read_text()))
    assert ours.pop("environment") == {
        "kind": "agent",
        "agent": "search:agent",
        "max_turns": built_in["environment"]["max_turns"] + 1,  # the last answer is a completion too
        "max_observation_tokens": built_in.pop("environment")["max_observation_tokens"],
    }
    assert ours["run"].pop("name") == "quickstart-agent" and built_in["run"].pop("name") == "quickstart"
    assert ours == built_in


def test_a_stage_is_done_only_with_its_product_and_its_key(driver: ModuleType, tmp_path: Path) -> None:
    stage = driver.Stage("train", (), tmp_path / "metrics.jsonl", "a", tmp_path)
    ledger = driver.StageLedger(tmp_path)
    ledger.record(stage, 2.0, done=False)
    ledger.record(stage, 3.0, done=True)
    assert not ledger.is_done(stage)
    stage.product.touch()
    again = driver.StageLedger(tmp_path)
    assert again.is_done(stage)
    assert again.seconds(stage) == 5.0  # over both attempts
    assert not again.is_done(driver.Stage("train", (), stage.product, "b", tmp_path))


def test_runs_that_share_built_files_share_the_record_of_who_built_them(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of seed 1 replace those of seed 0. The run with seed 0 must not take them."""
    monkeypatch.chdir(tmp_path)
    performed: list[str] = []

    def perform(stage: Any, ledger: Any, folder: Path) -> int:
        performed.append(stage.name)
        stage.product.parent.mkdir(parents=True, exist_ok=True)
        stage.product.touch()
        ledger.record(stage, 1.0, done=True)
        return 0

    finished: list[dict[str, float]] = []
    monkeypatch.setattr(driver, "perform", perform)
    monkeypatch.setattr(driver, "finish", lambda config, seconds: finished.append(seconds))
    every = ["build", "cold-start", "train"]
    first, second = ["run.seed=0", COLD], ["run.seed=1", "run.name=second", COLD]
    for overrides, expected in (
        (first, every),
        (first, []),
        (second, every),
        (first, every[:2]),
        (first, []),
    ):
        performed.clear()
        assert driver.run(driver.EXAMPLES["quickstart"], overrides) == 0
        assert performed == expected
    assert finished[0] == dict.fromkeys(every, 1.0)
    # The built files of two runs lie side by side: each has its own entry.
    for seed, data, name, expected in ((0, "1", "a", every), (1, "2", "b", every), (1, "1", "c", every)):
        performed.clear()
        model = f"runs/cold{data}/model"
        files = [
            f"data.train=runs/data{data}/train.jsonl",
            f"cold_start.output={model}",
            f"model.path={model}",
        ]
        driver.run(driver.EXAMPLES["quickstart"], [f"run.seed={seed}", f"run.name={name}", *files])
        assert performed == expected


def test_two_calls_at_a_time_do_not_share_built_files(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        driver.alone(Path("runs/quickstart")),
        pytest.raises(ConfigError, match="runs/quickstart is in use by another call"),
    ):
        driver.run(driver.EXAMPLES["quickstart"], ["run.name=second"])
    assert sorted(str(path) for path in Path("runs").rglob("stages.json")) == []
    with driver.alone(Path("runs/quickstart")):
        pass  # it is free again


def test_an_interrupted_training_is_resumed_and_a_changed_one_starts_again(
    driver: ModuleType, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step_1").mkdir(parents=True)
    assert driver.prepare_training(("train",), True, tmp_path) == ("train", "--resume")
    assert driver.prepare_training(("train",), False, tmp_path) == ("train",)
    assert not checkpoints.exists()


def test_a_failing_stage_shows_the_last_lines_of_its_ranks(
    driver: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('one'); print('the reason'); print('torch/distributed/elastic: x'); sys.exit(3)"
    stage = driver.Stage("train", (sys.executable, "-c", code), tmp_path / "metrics.jsonl", "a", tmp_path)
    assert driver.perform(stage, driver.StageLedger(tmp_path), tmp_path) == 3
    assert capfd.readouterr().err.splitlines() == ["one", "the reason"]
    assert (tmp_path / "logs" / "train.log").exists()


def test_a_cold_start_begins_without_the_model_of_other_settings(
    driver: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    product = tmp_path / "cold" / "config.json"
    product.parent.mkdir()
    there: list[bool] = []
    line = (sys.executable, "-c", "")
    stage = driver.Stage(
        "cold-start", line, product, "a", tmp_path, check=lambda: there.append(product.parent.exists())
    )
    assert driver.perform(stage, driver.StageLedger(tmp_path), tmp_path) == 0 and there == [False]
    assert "is removed: it was made with other settings" in " ".join(capfd.readouterr().out.split())


def test_output_is_shown_and_kept(
    driver: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = driver.forward((sys.executable, "-c", "print('hello')"), tmp_path / "x.log", os.environ)
    assert (status, capfd.readouterr().out, (tmp_path / "x.log").read_text()) == (0, "hello\n", "hello\n")
    killed = "import os; os.kill(os.getpid(), 15)"
    assert driver.forward((sys.executable, "-c", killed), tmp_path / "y.log", os.environ) == 143


# A signal just before signal.pause() would be waited for forever, and one within print() may be an error.
STOPPED = """
import os, signal, sys, time
def save(number, frame):
    os.write(1, f"saving after {signal.Signals(number).name}\\n".encode())
    time.sleep(0.5)
    os.write(1, b"saved\\n")
    sys.exit(85)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, save)
os.write(1, b"ready\\n" if os.getsid(0) == os.getpid() else b"gets a Ctrl-C twice\\n")
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_checkpoint_is_awaited_also_without_a_reader(
    number: signal.Signals, tmp_path: Path
) -> None:
    code = f"""
import os, sys, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(QUICKSTART)!r})
from pathlib import Path
import stages
from megatron_stppo.base.printing import drop_unwritable
drop_unwritable("stdout")
sys.exit(stages.forward((sys.executable, "-c", {STOPPED!r}), Path("x.log"), os.environ))
"""
    command = (sys.executable, "-c", code)
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.stdout.close()
        process.send_signal(number)
        assert process.wait(60) == 85
    log = (tmp_path / "x.log").read_text(encoding="utf-8")
    assert log == f"ready\nsaving after {number.name}\nsaved\n"
