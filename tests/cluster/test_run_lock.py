"""Every holder is a separate process, because the kernel's lock belongs to a process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.cluster import run_lock
from megatron_stppo.config import Config, ConfigError

HOLDS = """
import os, sys, time
from megatron_stppo.config import Config
from megatron_stppo.cluster import run_lock
run_lock.take(Config.model_validate({"model": {"path": "m"}, "run": {"root": sys.argv[1]}}))
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(60)
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "run": {"root": tmp_path}})


@contextmanager
def holder(config: Config, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that locks the folder until its input ends."""
    line = [sys.executable, "-c", HOLDS, str(config.run.root), *options]
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # including its fork


def write(config: Config, **changed: Any) -> Path:
    """Return the lock file's text for this process, with changes."""
    this = {"host": socket.gethostname(), "process": os.getpid(), "start": "another boot 1"}
    path = config.run.folder / run_lock.LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(this | changed))
    return path


def without_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)


def test_a_second_process_is_refused_with_host_and_process_of_the_first(config: Config) -> None:
    with holder(config) as first:
        said = f"in use by process {first.pid} on {socket.gethostname()}; wait until it ends"
        with pytest.raises(ConfigError, match=said):
            run_lock.take(config)
        assert first.communicate("")[0] == "" and first.returncode == 0
        assert (config.run.folder / run_lock.LOCK).read_bytes() == b"", (
            "a process that ends normally removes its name"
        )
        run_lock.take(config)


@pytest.mark.parametrize("options", [(), ("fork",)])
def test_a_killed_process_and_its_children_hold_no_lock(config: Config, options: tuple[str, ...]) -> None:
    with holder(config, *options) as first:
        first.kill()
        first.wait()
        assert str(first.pid) in (config.run.folder / run_lock.LOCK).read_text()
        run_lock.take(config)
        assert f'"process": {os.getpid()},' in (config.run.folder / run_lock.LOCK).read_text()


def test_a_process_id_that_is_used_again_is_not_the_holder(config: Config) -> None:
    write(config, process=os.getppid())  # alive, but started at another time
    run_lock.take(config)


def test_without_the_kernels_locks_a_living_process_of_this_host_keeps_the_folder(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernel_locks(monkeypatch)
    with holder(config) as first:
        with pytest.raises(ConfigError, match=f"process {first.pid} on"):
            run_lock.take(config)
        first.kill()
        first.wait()
        run_lock.take(config)


def test_the_lock_of_another_host_is_taken_over_when_it_is_no_longer_renewed(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_lock, "SILENT", 0.5)
    monkeypatch.setattr(run_lock, "LOOK", 0.1)
    write(config, host="node7", process=12)
    began = time.monotonic()
    run_lock.take(config)
    assert time.monotonic() - began > 0.5
    assert "process 12 on node7" in capsys.readouterr().err
    assert "node7" not in (config.run.folder / run_lock.LOCK).read_text()


def test_the_lock_of_another_host_that_is_renewed_is_respected(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "LOOK", 0.1)
    path = write(config, host="node7", process=12)
    renewing = threading.Timer(0.3, os.utime, (path,))
    renewing.start()
    with pytest.raises(ConfigError, match="in use by process 12 on node7"):
        run_lock.take(config)
    renewing.join()
    assert "node7" in path.read_text()


def test_the_process_waits_for_a_lock_that_a_file_server_keeps_for_another_host(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder here plays the file server: the text names a machine that has ended."""
    for name, seconds in (("SILENT", 0.2), ("LEASE", 0.6), ("LOOK", 0.1)):
        monkeypatch.setattr(run_lock, name, seconds)
    with holder(config) as server:
        path = write(config, host="node7", process=12)
        began = time.monotonic()
        with pytest.raises(ConfigError, match="process 12 on node7"):
            run_lock.take(config)
        assert time.monotonic() - began > 0.6
        server.kill()
        server.wait()
        run_lock.take(config)
        assert "node7" not in path.read_text()


def test_a_holder_renews_its_lock(config: Config) -> None:
    with holder(config):
        path = config.run.folder / run_lock.LOCK
        first, deadline = path.stat().st_mtime_ns, time.monotonic() + 30
        while path.stat().st_mtime_ns == first:
            assert time.monotonic() < deadline
            time.sleep(0.1)
