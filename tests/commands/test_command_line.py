"""The command line as a user runs it, in a separate process."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from megatron_stppo import __main__ as command_line
from megatron_stppo.base.errors import CannotRecord, CheckpointError, DoNotRestart, Requeue
from megatron_stppo.cluster.launch import process
from megatron_stppo.commands.environments import TEMPLATE
from megatron_stppo.commands.train import noting_the_end
from megatron_stppo.config import Config
from tests.full_disk import full_disk

QUICKSTART = str(Path(__file__).parents[2] / "examples" / "quickstart" / "config.yaml")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_stppo", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )


def test_help_takes_less_than_half_a_second() -> None:
    before = os.times()
    result = run("--help")
    after = os.times()
    # CPU time, which equals wall time on a machine that is not busy with other tests.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.5
    assert result.returncode == 0
    for command in "train replay rollout evaluate cold-start convert build-index plan doctor".split():
        assert command in result.stdout


def test_help_does_not_import_torch() -> None:
    code = "import sys, megatron_stppo.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_gives_every_command_a_whole_sentence_and_an_example() -> None:
    overview = run("--help", COLUMNS="80").stdout.partition("Commands:")[2]
    assert "..." not in overview
    commands = re.findall(r"^  ([a-z][a-z-]+)  ", overview, re.MULTILINE)
    assert {"train", "init", "convert"} <= set(commands)
    of_convert = run("convert", "--help", COLUMNS="80").stdout
    assert "..." not in of_convert.partition("Commands:")[2]
    group: Any = typer.main.get_command(command_line.app)
    for name, command in group.commands.items() | group.commands["convert"].commands.items():
        if name != "convert" and not command.hidden:  # convert is a group of commands
            assert re.search(rf"megatron[-_]stppo (convert )?{name}\b", command.epilog), name


def test_every_command_with_an_environment_finds_modules_in_a_folder_that_is_given(tmp_path: Path) -> None:
    group: Any = typer.main.get_command(command_line.app)
    taking = {n for n, command in group.commands.items() if "modules" in {p.name for p in command.params}}
    players = {"train", "replay", "rollout", "evaluate", "cold-start", "verify"}
    assert taking == {*players, "check-environment"}
    (tmp_path / "config.yaml").write_text("model: {path: m}\n")
    words = ["check-environment", "guess:factory", str(tmp_path / "config.yaml")]
    assert "no allowed folder has this module" in run(*words).stderr
    result = run(*words, "--modules", str(TEMPLATE))
    assert (result.returncode, result.stderr.partition(" in ")[0]) == (0, "no problem"), result.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["train", "--help"], ["trian"]])
def test_the_module_and_the_console_script_say_the_same(arguments: list[str]) -> None:
    script = Path(sys.executable).with_name("megatron-stppo")
    as_script = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=120)
    as_module = run(*arguments)
    assert (as_script.returncode, as_script.stdout, as_script.stderr) == (
        as_module.returncode,
        as_module.stdout,
        as_module.stderr,
    )


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"megatron-stppo {importlib.metadata.version('megatron-stppo')}\n"


@pytest.mark.parametrize("command", [[], ["trian"], ["train"], ["train", QUICKSTART, "--no-such-option"]])
def test_bad_usage_exits_2(command: list[str]) -> None:
    assert run(*command).returncode == 2


@pytest.mark.parametrize("field", ["update.actor.lr", "run.seed", "megatron.layernorm_epsilon"])
def test_infinity_is_refused(field: str) -> None:
    result = run("train", QUICKSTART, f"{field}=.inf")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith(f"megatron-stppo: {field}=inf: ")
    assert "finite number" in result.stderr


def test_a_folder_that_holds_no_run_is_not_replayed(tmp_path: Path) -> None:
    result = run("replay", str(tmp_path), "run.name=again")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith(f"megatron-stppo: RUN_DIR={tmp_path}: holds no config.yaml; give a run's")


def test_a_missing_model_gives_one_clear_line_and_nothing_is_written(tmp_path: Path) -> None:
    result = run("train", QUICKSTART, f"run.root={tmp_path}", f"model.path={tmp_path / 'none'}")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "no such folder" in result.stderr
    assert not list(tmp_path.iterdir())


def test_only_the_first_rank_prints() -> None:
    result = run("train", QUICKSTART, "update.epoch=2", RANK="1", WORLD_SIZE="2")
    assert (result.returncode, result.stderr) == (2, "")


@pytest.mark.parametrize(("end", "code"), [(DoNotRestart, 93), (CheckpointError, 93), (Requeue, 85)])
def test_every_end_that_a_scheduler_distinguishes_has_its_own_exit_code(
    end: type[Exception], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise end("7 steps were not finite")

    app = typer.Typer()
    app.command()(fail)
    monkeypatch.setattr(command_line, "app", app)
    monkeypatch.setattr(sys, "argv", ["megatron-stppo"])
    monkeypatch.delenv("RANK", raising=False)
    assert command_line.run() == code
    assert capsys.readouterr().err == "megatron-stppo: 7 steps were not finite\n"


FAILS_WHILE_GLOO_WORKS = """
import ctypes, sys, typer, torch, torch.distributed as dist
from megatron_stppo import __main__ as command_line
from megatron_stppo.base.errors import DoNotRestart

app = typer.Typer()

@app.command()
def fail():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2000):  # gloo's thread still releases these tensors when the process ends
        dist.all_reduce(torch.ones(100_000), async_op=True)
    print("of Python")
    ctypes.CDLL(None).puts(b"of C")
    raise DoNotRestart("7 steps were not finite")

command_line.app = app
sys.argv = ["megatron-stppo"]
command_line.main()
"""


def test_a_run_that_fails_while_gloo_works_has_its_exit_code_and_all_of_its_output() -> None:
    # with Python's own end, this process aborted in 8 of 9 runs
    left = subprocess.run(
        [sys.executable, "-c", FAILS_WHILE_GLOO_WORKS],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )
    assert left.returncode == 93
    assert left.stdout == "of Python\nof C\n"
    assert left.stderr == "megatron-stppo: 7 steps were not finite\n"


def test_output_that_cannot_be_written_at_the_end_is_an_error_unless_there_is_another() -> None:
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        for code, expected in ((0, 120), (85, 85)):
            program = f"from megatron_stppo.cluster.exits import leave; print(1); leave({code})"
            left = subprocess.run([sys.executable, "-c", program], stdout=full, env=buffered, timeout=120)
            assert left.returncode == expected
        # what `train` prints may be lost; what `plan` prints is all that it does
        for words, expected in (("train --help", 0), ("plan --help", 1), ("train no.yaml", 2)):
            line = [sys.executable, "-m", "megatron_stppo", *words.split()]
            assert subprocess.run(line, stdout=full, stderr=full, timeout=120).returncode == expected


def test_a_thread_that_never_ends_does_not_keep_the_process() -> None:
    program = (
        "import threading, sys; from megatron_stppo.cluster.exits import end_within; end_within(85, 0.2);"
        "threading.Thread(target=threading.Event().wait, name='asyncio_0').start(); sys.exit(85)"
    )
    left = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=120)
    assert left.returncode == 85
    assert left.stderr == "megatron-stppo: after 0.2 s threads did not end: asyncio_0\n"


def test_the_text_of_a_users_sys_exit_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        sys.exit("MY_TOKEN is not set")

    app = typer.Typer()
    app.command()(end)
    monkeypatch.setattr(command_line, "app", app)
    monkeypatch.setattr(sys, "argv", ["megatron-stppo"])
    assert command_line.run() == 1
    assert capsys.readouterr().err == "MY_TOKEN is not set\n"


def test_a_locale_without_utf_8_is_one_line_with_the_remedy() -> None:
    ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    code = "from megatron_stppo.cluster.launch import process; process.prepare()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ascii, capture_output=True, text=True
    )
    assert "ConfigError: the locale's encoding is ascii: set PYTHONUTF8=1, or LC_ALL=C.UTF-8" in done.stderr


def test_an_exit_json_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"path": "m"}, "run": {"root": tmp_path}})
    with pytest.raises(CheckpointError, match="disk"), noting_the_end(config):
        raise CheckpointError("the disk is full")  # while there is no folder to write to


def test_a_full_disk_is_one_line_with_the_folder_and_leaves_no_empty_exit_json(tmp_path: Path) -> None:
    """Rows of metrics and dumps of tensors are written by other packages too, whose errors name no file."""
    config = Config.model_validate({"model": {"path": "m"}, "run": {"root": str(tmp_path), "name": "full"}})
    note = tmp_path / "full" / "exit.json"
    note.parent.mkdir()
    for size, written in ((16, []), (10**6, [note])):
        with pytest.raises(CannotRecord) as raised, full_disk(size), noting_the_end(config):
            raise OSError(errno.ENOSPC, "No space left on device")
        assert list(note.parent.glob("exit*")) == written
    assert str(raised.value).startswith(f"{note.parent}: cannot be written (No space left on device); ")
    assert json.loads(note.read_text()) == {"code": 93, "reason": str(raised.value)}
    with pytest.raises(PermissionError), noting_the_end(config):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_log_on_a_full_disk_prints_nothing_about_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process.log_to(tmp_path, 0)
    handler = logging.getLogger().handlers[-1]
    try:
        with full_disk():
            logging.getLogger(__name__).warning("a line that does not fit")
    finally:
        logging.getLogger().removeHandler(handler)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("end", "drawn"), [(None, True), (DoNotRestart, True), (Requeue, False)])
def test_a_run_that_is_not_resumed_has_its_report_page(
    end: type[Exception] | None, drawn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    config = Config.model_validate({"model": {"path": "m"}, "run": {"root": tmp_path, "name": "collapsed"}})
    config.run.folder.mkdir()
    (config.run.folder / "metrics.jsonl").write_text('{"iteration": 1, "rollout/reward": 0.5}\n')
    with suppress(DoNotRestart, Requeue), noting_the_end(config):
        if end is not None:
            raise end("why")
    page = config.run.folder / "report.html"
    assert page.exists() == drawn
    assert not drawn or "collapsed" in page.read_text()


def test_incomplete_variables_of_srun_give_one_line_from_the_first_rank_of_a_node() -> None:
    variables = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    first, second, third = (
        run("train", QUICKSTART, **variables, SLURM_PROCID=rank, SLURM_LOCALID=local)
        for rank, local in (("0", "0"), ("1", "1"), ("2", "0"))
    )
    assert (first.returncode, second.returncode, second.stderr) == (2, 2, "")
    assert first.stderr.startswith("megatron-stppo: SLURM_JOB_NODELIST: not set or empty, but other")
    assert len(first.stderr.splitlines()) == 1
    assert third.stderr == first.stderr.replace("stppo: ", "stppo: rank 2: ")
