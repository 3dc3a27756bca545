"""train and evaluate as functions: what they raise, print and return.

tests/commands/test_new_project.py trains with them. The notebook's test evaluates too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo import evaluate, load_config, train
from megatron_stppo.commands import python as commands
from megatron_stppo.config import ConfigError

# Prints, waits for an interrupt, prints again and ends with the exit code of a run that wrote a checkpoint.
WAITS = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (print("checkpoint", flush=True), sys.exit(85)))
print("begun", flush=True)
time.sleep(60)
"""


def test_an_error_is_an_exception_with_the_message_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: nowhere}\n")
    for call in (lambda: train(path), lambda: evaluate(load_config(path), ranks=1)):
        with pytest.raises(ConfigError, match=r"^model\.path=nowhere: no such folder; give a Hugging Face"):
            call()
        assert "megatron-stppo: model.path=nowhere: no such folder" in capsys.readouterr().out


def test_a_wrong_field_is_found_before_a_process_is_started(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: nowhere}\n")
    with pytest.raises(ConfigError, match=r"^run\.sed=1: no such field; did you mean run\.seed\?$"):
        train(path, ["run.sed=1"])
    with pytest.raises(ConfigError, match=r"^overrides=\['run.seed=1'\]: are for a file"):
        train(load_config(path), ["run.seed=1"])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"overrides": "run.name=x"}, r"overrides='run.name=x': is one text; give a list, \['run.name=x'\]"),
        ({"ranks": 0}, "ranks=0: give the number of processes, 1 or more"),
        ({"modules": "nodir"}, "modules=nodir: is not a folder; give the one with"),
    ],
)
def test_a_wrong_argument_is_found_before_a_process_is_started(
    tmp_path: Path, arguments: dict[str, Any], why: str
) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: m}\n")
    with pytest.raises(ConfigError, match=why):
        train(tmp_path / "run.yaml", **arguments)


def test_an_interrupt_reaches_the_command_which_ends_before_the_caller_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    timer = threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            commands._forward([sys.executable, "-c", WAITS], dict(os.environ))
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out == "begun\ncheckpoint\n"


@pytest.mark.parametrize(
    ("program", "message", "code"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "train ended by signal 9; see", -9),
        ("raise SystemExit(7)", "train ended with exit code 7; see the output above", 7),
    ],
)
def test_a_process_that_gives_no_reason_is_described(
    tmp_path: Path, program: str, message: str, code: int
) -> None:
    status = commands._forward([sys.executable, "-c", program], dict(os.environ))
    error = commands._failure("train", status, tmp_path / "none.json")
    assert isinstance(error, commands.RunFailed)
    assert str(error).startswith(message) and error.exit_code == code


def test_the_exit_code_of_a_rank_is_known_although_torchrun_ends_with_another(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    file.write_text('{"message": "megatron-stppo: preempted", "timestamp": "0", "exit_code": 85}')
    error = commands._failure("train", 1, file)
    assert isinstance(error, commands.RunFailed) and (str(error), error.exit_code) == ("preempted", 85)
