"""Commands as Python functions. Each runs the command line in a process of its own.

Training changes a process for good: it loads megatron and vLLM in a fixed order, joins process groups, and
installs signal handlers. In a process of its own it leaves a notebook as it was, may be interrupted, and does
exactly what the command does.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_stppo.cluster.preemption import passed_on
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import load

USAGE = 2  # exit code of an error in the configuration or its files
PREFIX = "megatron-stppo: "
# A notebook sets these, and then progress bars would be drawn again and again instead of plain lines.
TERMINAL = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


class RunFailed(RuntimeError):
    """A command ended with another exit code than 0 and 2. The message is that of the command line.

    Example: error.exit_code == 85 if the run has written a checkpoint, and `resume=True` continues it.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a YAML file with overrides, and check every field. Raises ConfigError.

    Example: load_config("config.yaml", ["run.iterations=2"]).environment.max_turns.
    """
    _check_list(overrides)
    return load(Path(path), list(overrides)).beside(Path(path).parent)


def train(
    config: Config | Path | str,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    ranks: int = 1,
    modules: Path | str | None = None,
) -> Path:
    """Train with reinforcement learning, print the output as it comes, and return the run's folder.

    config: a configuration, or the path of its file, to which `overrides` are applied.
    resume: continue an existing run from its newest checkpoint. ranks: processes, one per device.
    modules: the folder of the modules that `environment` names; default: that of the configuration's file.
    An interrupt ends the run after the iteration, with a checkpoint; a second one ends it at once.
    Raises ConfigError and RunFailed, with the command line's message.
    Example: train("config.yaml", ["run.iterations=2"]).
    """
    settings = _settings(config, overrides)
    _run("train", settings, ["--resume"] if resume else [], ranks, modules)
    return settings.run.folder


def evaluate(
    config: Config | Path | str,
    overrides: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    ranks: int = 1,
    modules: Path | str | None = None,
) -> dict[str, float]:
    """Measure the model on data.evaluate, print the output as it comes, and return the numbers by name.

    checkpoint: "step_N" or "latest" of the run; default: model.path. The other arguments and the errors are
    those of `train`. Example: evaluate("config.yaml", checkpoint="latest")["evaluate/exact_match"].
    """
    settings = _settings(config, overrides)
    earlier = _results(settings)
    options = ["--checkpoint", checkpoint] if checkpoint else []
    options += [given for given in overrides if given.startswith("model.path=")]  # not that of the run
    _run("evaluate", settings, options, ranks, modules)
    (result, *_) = sorted(_results(settings) - earlier, key=lambda path: -path.stat().st_mtime)
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name.startswith("evaluate/")}


def _check_list(overrides: Sequence[str]) -> None:
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r}: is one text; give a list, [{overrides!r}]")


def _results(settings: Config) -> set[Path]:
    """Return the results of the run's evaluations, each in a folder of its own."""
    return set(settings.run.folder.glob("evaluate/*/result.json"))


def _settings(config: Config | Path | str, overrides: Sequence[str]) -> Config:
    _check_list(overrides)
    if not isinstance(config, Config):
        return load_config(config, overrides)
    if overrides:
        raise ConfigError(
            f"overrides={list(overrides)}: are for a file; give them to load_config, or give train the file"
        )
    return config


def _run(
    command: str, settings: Config, options: Sequence[str], ranks: int, modules: Path | str | None
) -> None:
    """Run a command and print what it prints. Raises ConfigError and RunFailed."""
    if ranks < 1:
        raise ConfigError(f"ranks={ranks}: give the number of processes, 1 or more")
    if modules is not None and not Path(modules).is_dir():
        raise ConfigError(f"modules={modules}: is not a folder; give the one with the modules of environment")
    with tempfile.TemporaryDirectory(prefix="stppo-") as scratch:
        file, error = Path(scratch) / "config.yaml", Path(scratch) / "error.json"
        file.write_text(settings.dump(), encoding="utf-8")
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        program = [sys.executable, *(launcher if ranks > 1 else ()), "-m", "megatron_stppo"]
        # the file to which the command line and torchrun write the reason of a failure
        given = os.environ | {"TORCHELASTIC_ERROR_FILE": str(error), "PYTHONUNBUFFERED": "1"}
        for name in TERMINAL:
            given.pop(name, None)
        if modules is not None:
            given["PYTHONPATH"] = os.pathsep.join(filter(None, (str(modules), given.get("PYTHONPATH"))))
        beside = modules or settings.environment.modules
        options = [*options, *(("--modules", str(beside)) if beside else ())]
        status = _forward([*program, command, str(file), *options], given)
        if status:
            raise _failure(command, status, error)


def _forward(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a process, print its lines to sys.stdout, and return its exit status.

    A notebook shows what Python prints, not what a child process prints. The process has a session of its
    own, and gets an interrupt once, wherever it came from. SIGTERM and SIGHUP are passed on to it, unless the
    program handles them.
    """
    start = partial(
        subprocess.Popen[str],
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    with passed_on(start, (signal.SIGTERM, signal.SIGHUP)) as process:
        assert process.stdout is not None
        interrupted = False
        while True:
            try:
                for line in process.stdout:
                    sys.stdout.write(line)
                    sys.stdout.flush()
                process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    return process.returncode


def _failure(command: str, status: int, error: Path) -> Exception:
    """Return the exception of a failed command. error: the file with its reason, if it could write one."""
    try:
        given: dict[str, Any] = json.loads(error.read_text(encoding="utf-8"))
        message, code = str(given["message"]).removeprefix(PREFIX), int(given["exit_code"])
    except (OSError, ValueError, LookupError, TypeError):  # a killed process writes none
        how = f"by signal {-status}" if status < 0 else f"with exit code {status}"
        message, code = f"{command} ended {how}; see the output above", status
    return ConfigError(message) if code == USAGE else RunFailed(message, code)
