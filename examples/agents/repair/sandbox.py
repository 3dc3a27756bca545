"""Runs code that the policy wrote in a sandbox of bubblewrap, and compares its results outside.

The sandbox contains Python, the repository, and arguments of functions. The results that are expected stay
outside: a test in the process of the code that it tests could be made to pass by that code.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 10.0  # for the tests of a module
MOST = 2**16  # bytes of output
PYTHON = os.path.realpath(sys.executable)
# No network, no other processes, nothing that can be written, and no file except those named here.
BUBBLEWRAP = [
    *("prlimit", "--as=1000000000", "--cpu=10"),  # bytes of memory and seconds of a processor, per process
    *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
    *(word for name in ("/usr", "/lib", "/lib64") for word in ("--ro-bind-try", name, name)),
    *("--ro-bind", sys.base_prefix, sys.base_prefix),
]


class SandboxFailed(RuntimeError):
    """The sandbox cannot be started, which says nothing about the policy."""


def failures(folder: Path, module: str, tests: list[Any], is_safe: bool = True) -> list[str]:
    """Return a text for each test that fails, "" for those that pass.

    folder: the repository. is_safe=False runs the policy's code without a sandbox: only for trusted policies.
    """
    words = _output(folder, module, tests, is_safe).decode("utf-8", "replace").split("\n")
    if words[0] != "ready":
        raise SandboxFailed("the sandbox did not start; is bwrap installed, may users make namespaces?")
    return [
        "" if line == json.dumps(test["result"]) else f"{_shown(test)} gave {line or 'nothing'}"
        for test, line in itertools.zip_longest(tests, words[1 : len(tests) + 1], fillvalue="")
    ]


def _shown(test: Any) -> str:
    arguments = ", ".join(map(json.dumps, test["arguments"]))
    return f"{test['call']}({arguments}) must be {json.dumps(test['result'])} and"


def _output(folder: Path, module: str, tests: list[Any], is_safe: bool) -> bytes:
    # Read-only: else the code could replace a file by a link, through which the agent would write outside.
    inside = [*BUBBLEWRAP, "--ro-bind", str(folder), "/work", "--chdir", "/work", "--remount-ro", "/"]
    command = [PYTHON, "-I", "-B", "-c", (HERE / "runner.py").read_text(encoding="utf-8"), module]
    calls = [{key: test[key] for key in ("call", "arguments")} for test in tests]
    with subprocess.Popen(
        [*(inside if is_safe else ()), *command],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},  # not the key of the episode
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(SECONDS, _kill, [process.pid])
        timer.start()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(calls).encode())
            process.stdin.close()
        output = process.stdout.read(MOST)
        timer.cancel()
        _kill(process.pid)
    return output


def _kill(group: int) -> None:
    """With bubblewrap this ends all processes of the sandbox."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
