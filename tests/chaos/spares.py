"""Replicas that start in a second instead of ten: forks that have imported everything before.

A trainer starts its replicas with subprocess.Popen, and most of their start is imports. `Spares.popen` takes
its place: it hands the command line and the environment to a fork that waits for them. Like a real replica it
is a child of the trainer, and it runs the same program from its command line on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from megatron_stppo.__main__ import run as run_command_line
from megatron_stppo.cluster.launch import process
from tests.chaos.moments import Orders

MESSAGE = 2**16  # bytes of a command line and an environment


class Spares:
    """Forks of this process that wait to become a replica. Make them before this process starts threads.

    They end with this process. log: gets a line "PID NAME" for each replica that was started.
    orders: what each of them follows under its name.
    """

    def __init__(self, count: int, log: Path, orders: Orders) -> None:
        self._left, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = dict(os.environ)  # of the forks
        for _ in range(count):
            if os.fork() == 0:
                self._left.close()  # so that a spare sees when the trainer has closed its end
                _wait(theirs, log, orders)
        theirs.close()

    @property
    def subprocess(self) -> SimpleNamespace:
        """What replicas/trainer/local.py uses of the module subprocess."""
        names = ("DEVNULL", "TimeoutExpired")
        return SimpleNamespace(Popen=self.popen, **{name: getattr(subprocess, name) for name in names})

    def popen(self, command: Sequence[str], env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> Fork:
        """Start a replica. One of the spares receives the message."""
        changed = {name: value for name, value in env.items() if self._environment.get(name) != value}
        message = json.dumps([command[3:], changed]).encode()  # without PYTHON -m megatron_stppo
        socket.send_fds(self._left, [message], [stdout.fileno()])
        return Fork(int(self._left.recv(MESSAGE)))


class Fork:
    """A child, with what replicas/trainer/local.py uses of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        ends = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("replica", timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)


def run(arguments: Sequence[str], output: int) -> NoReturn:
    """Run the program with its output in the file descriptor, and end this process."""
    code = 255
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not the progress bar's
        logging.getLogger().handlers.clear()
        process.prepare = lambda **_: None  # type: ignore[assignment]  # done before the fork
        sys.argv = ["megatron-stppo", *arguments]
        code = run_command_line()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _wait(trainer: socket.socket, log: Path, orders: Orders) -> NoReturn:
    message, descriptors, _, _ = socket.recv_fds(trainer, MESSAGE, 1)
    if not message:
        os._exit(0)
    arguments, environment = json.loads(message)
    name = arguments[arguments.index("--name") + 1]
    orders.follow(name)
    with log.open("a") as file:
        file.write(f"{os.getpid()} {name}\n")
    trainer.send(str(os.getpid()).encode())
    trainer.close()
    os.setsid()
    os.environ.update(environment)
    run(arguments, descriptors[0])
