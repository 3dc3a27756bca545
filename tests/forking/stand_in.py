"""A stand-in for Python that starts `python -m MODULE` in milliseconds.

Importing torch, vLLM and megatron takes 10 s of one core, more than the runs of the tests. A server has
imported them (tests/preloaded.py), and forks a process whenever its client, a small program, asks for one.
The client passes on arguments, variables, working directory, umask and the standard files. It forwards
signals to the process, ends as the process ends, and takes it along when it is killed. The process has the
parent of the client, but a process id of its own. All processes hash strings with one seed, and a process
ends without taking its modules apart. Python itself starts what is not a module, and a module for which a
variable has another value that is read at import (server.READ_AT_START).

Example: subprocess.run([stand_in.python(), "-m", "megatron_stppo", "train", "config.yaml"]). In the process,
sys.executable is the stand-in too, so that the processes that it starts are forked as well.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import torch

from tests.forking import server
from tests.ranks import context

_servers: list[psutil.Process] = []  # at most one


@functools.cache
def python() -> str:
    """Return the path of the stand-in. The server runs until this process ends. With a GPU: Python itself."""
    if torch.cuda.is_available():
        return sys.executable
    folder = tempfile.TemporaryDirectory(prefix="forking-")
    path = Path(folder.name) / "python"
    source = Path(__file__).with_name("client.py").read_text()
    path.write_text(f"#!{sys.executable} -IS\n{source}")
    path.chmod(0o700)
    listener = server.listen(path.with_name("socket"))
    receive, send = context().Pipe(duplex=False)
    python = server.Python(sys.executable, str(path), _plain_path())
    process = context().Process(target=server.serve, args=(listener, receive, python))
    process.start()
    listener.close()
    receive.close()
    _servers.append(psutil.Process(process.pid))

    def end() -> None:
        send.close()
        process.join()
        folder.cleanup()

    atexit.register(end)
    return str(path)


def _plain_path() -> list[str]:
    """Return sys.path of a Python that was started elsewhere and without PYTHONPATH."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    done = subprocess.run(line, capture_output=True, check=True, env=plain)
    found: list[str] = json.loads(done.stdout)
    return found


def processes() -> list[psutil.Process]:
    """Return all forked processes, with those that keep their connections, and what they have started."""
    return [process for server in _servers for process in server.children(recursive=True)]
