"""Forks the processes that clients ask for: see tests/forking/stand_in.py."""

from __future__ import annotations

import atexit
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from tests.forking.client import FORWARDED


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


@dataclass(frozen=True)
class Request:
    """The process that a client asks for. Example: arguments ["-m", "megatron_stppo", "doctor"]."""

    client: int  # its process id
    umask: int
    folder: str
    arguments: list[str]
    variables: dict[str, str]
    files: list[int]  # standard input, output and error

    @classmethod
    def receive(cls, connection: socket.socket) -> Request:
        size, files, _, _ = socket.recv_fds(connection, 8, 3)
        with connection.makefile("rb") as sent:
            text = sent.read(int.from_bytes(size, "big")).decode(errors="surrogateescape")
        client, umask, folder, count, *words = text.split("\0")
        arguments, variables = words[: int(count)], words[int(count) :]
        named = dict(word.split("=", 1) for word in variables)
        return cls(int(client), int(umask), folder, arguments, named, files)


def serve(listener: socket.socket, alive: Connection, python: str, stand_in: str) -> None:
    """Fork the processes of all clients, until the other end of `alive` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the clients
    signal.signal(signal.SIGCHLD, _reap)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(alive, selectors.EVENT_READ)
        while all(key.fileobj is listener for key, _ in selector.select()):
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    selector.close()
                    listener.close()
                    _keep(connection, python, stand_in)


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep(connection: socket.socket, python: str, stand_in: str) -> NoReturn:
    """Fork the process, and send the client its process id and, when it has ended, its exit status.

    If the client ends first, the process is killed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        request = Request.receive(connection)
        child = os.fork()
        if child == 0:
            connection.close()
            _become(request, python, stand_in)
        for file in request.files:
            os.close(file)
        connection.sendall(f"{child}\n".encode())
        with selectors.DefaultSelector() as selector:
            selector.register(os.pidfd_open(child), selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            if any(key.fileobj is connection for key, _ in selector.select()):
                os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(BrokenPipeError):
            connection.sendall(f"{code}\n".encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _become(request: Request, python: str, stand_in: str) -> NoReturn:
    """Run the module in this process, as Python would."""
    code = 1
    try:
        os.setsid()
        os.umask(request.umask)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(sys.modules["tests.preloaded"].VARIABLES | request.variables)
        for number, file in enumerate(request.files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin = open(0, closefd=False)  # multiprocessing has closed it
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.getppid = lambda: _parent(request.client)
        words = [word for word in request.arguments if word != "-u"]
        if words[0] != "-m":
            os.execv(python, [python, *request.arguments])
        sys.executable, sys.argv = stand_in, words[1:]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [request.folder, *filter(None, paths)]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of Python does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)  # the end of Python takes seconds: it takes all modules apart


def _parent(process: int) -> int:
    """Return the process id of the parent of a process."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
