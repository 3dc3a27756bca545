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

# Python and libraries read these at their start. With another value, Python itself starts the program.
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "VLLM_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "HF_", "TRANSFORMERS_")
BECOMES = ("PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS")  # _become does what they ask for
# not read at the start; the scripts of examples/slurm set them
FOLDERS = ("PYTHON", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
# pyarrow's allocator has handlers that stop and start its thread around a fork.
THREADS = {"jemalloc_bg_thd"}


@dataclass(frozen=True)
class Python:
    """What a process needs to know of the Python that it stands for."""

    program: str
    stand_in: str
    path: list[str]  # sys.path of `python -m`, without the working directory and PYTHONPATH


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


def serve(listener: socket.socket, alive: Connection, python: Python) -> None:
    """Fork the processes of all clients, until the other end of `alive` is closed."""
    threads = [
        Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")
    ]
    others = sorted(threads)
    others.remove(Path("/proc/self/comm").read_text().strip())
    assert set(others) <= THREADS, f"forked processes would lack the threads {others}"
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
                    _keep(connection, python)


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep(connection: socket.socket, python: Python) -> NoReturn:
    """Fork the process, and send the client its process id and, when it has ended, its exit status.

    If the client ends first, the process is killed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        request = Request.receive(connection)
        child = os.fork()
        if child == 0:
            connection.close()
            _become(request, python)
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


def _become(request: Request, python: Python) -> NoReturn:
    """Run the module in this process, as Python would."""
    code = 1
    try:
        preloaded = sys.modules["tests.preloaded"]
        os.setsid()
        os.umask(request.umask)
        os.chdir(request.folder)
        for number, file in enumerate(request.files):
            os.dup2(file, number)
            os.close(file)
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        if request.arguments[0] == "-u":
            request.arguments.pop(0)
            request.variables["PYTHONUNBUFFERED"] = "1"
        if request.arguments[0] != "-m" or not _fits(request.variables, preloaded.GIVEN, preloaded.VARIABLES):
            unbuffered = ["-u"] * ("PYTHONUNBUFFERED" in request.variables)
            os.execve(python.program, [python.program, *unbuffered, *request.arguments], request.variables)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(preloaded.VARIABLES | request.variables)
        sys.stdin = open(0, closefd=False)  # multiprocessing has closed it
        sys.stdout = open(
            1, "w", closefd=False, encoding="utf-8"
        )  # the server's may be of another kind of file
        if "PYTHONUNBUFFERED" in request.variables:
            sys.stdout.reconfigure(write_through=True)
        os.getppid = lambda: _parent(request.client)
        preloaded.start(request.client)
        sys.executable, sys.argv = python.stand_in, request.arguments[1:]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [request.folder, *filter(None, paths), *python.path]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # a program finds them only if its path has them
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of Python does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code & 255)  # the end of Python takes seconds: it takes all modules apart


def _fits(variables: dict[str, str], given: dict[str, str], prepared: dict[str, str]) -> bool:
    """Return whether libraries would be imported under these variables as they were imported here.

    given, prepared: the variables of this process before and after the imports.
    """
    read = {name for name in {*variables, *given} if name.startswith(READ_AT_START)} - {*BECOMES, *FOLDERS}
    return all(variables.get(name) in (given.get(name), prepared.get(name)) for name in read)


def _parent(process: int) -> int:
    """Return the process id of the parent of a process."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
