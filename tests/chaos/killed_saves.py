"""A save that is killed at its k-th system call, for every k: a published checkpoint must be loadable.

One process imports everything once and forks: a child loads step 1, changes the weights and saves step 2,
with os._exit in place of the k-th call; a second child then loads the newest checkpoint. Each is a world of
one rank over gloo, with megatron's model and distributed optimizer.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_stppo.checkpoint.saving import Saver
from megatron_stppo.model.optimizer import Trainer
from tests.chaos.one_rank import add, files, in_child, start

KILLED = 77
NO_FILE = ("BytesIO", "StringIO", "fspath", "getpid", "WEXITSTATUS")  # of posix and io, and touch no file


class Bench:
    """A checkpoints folder that is restored before every save. It has step 1, which LATEST names; damaged
    steps 2 and 3, one of which has the name of the new step; and the rest of an interrupted save. One step is
    kept, so that the save removes all of them."""

    def __init__(self, root: Path, model: Path, background: bool) -> None:
        self._root, self._folder, self._template = root, root / "checkpoints", root / "template"
        self._model, self._run = model, {"async_checkpoints": background, "keep_checkpoints": 1}
        gc.freeze()  # the imported modules; every child collects garbage
        in_child(self._write_template)
        self._put_back()
        code = in_child(self._save, 0)
        assert code == 0, f"the undisturbed save ended with {code}"
        self.calls = (root / "calls").read_text().splitlines()
        self._whole = {1: files(self._template / "step_1"), 2: files(self._folder / "step_2")}

    def worth(self, every: int) -> list[int]:
        """Return the calls to test: all except writes into buffers, of which every `every`-th."""
        numbered = list(enumerate(self.calls, 1))
        writes = [number for number, name in numbered if name == "BufferedWriter.write"]
        return sorted({number for number, _ in numbered} - set(writes) | set(writes[::every]))

    def die_at(self, call: int) -> tuple[int, str]:
        """Return (the step that could be loaded, an error or ""). Calls count from 1."""
        self._put_back()
        code = in_child(self._save, call)
        if code != KILLED:
            return 0, f"call {call}: the save ended with {code} in place of {KILLED}"
        step = in_child(self._load)
        if step not in self._whole:
            return step, f"call {call}, {self.calls[call - 1]}: loading what is left ended with {step}"
        if files(self._folder / f"step_{step}") != self._whole[step]:
            return step, f"call {call}, {self.calls[call - 1]}: step_{step} has other bytes"
        return step, ""

    def _put_back(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._template, self._folder)

    def _start(self, folder: Path) -> tuple[Saver, dict[str, Trainer]]:
        with (self._root / "log").open("ab") as log:  # the output is kept, but not printed
            os.dup2(log.fileno(), 2)
        return start(folder, self._model, **self._run)

    def _write_template(self) -> int:
        saver, trainers = self._start(self._template)
        saver.save(1, trainers, {"iteration": 1})
        saver.finish()
        for name in ("step_2", "step_3", "step_2.tmp-0"):  # their manifest is that of step 1
            shutil.copytree(self._template / "step_1", self._template / name)
        return 0

    def _save(self, call: int) -> int:
        saver, trainers = self._start(self._folder)
        assert saver.load(trainers) is not None
        add(trainers, 0.01)
        with file_calls(die_at=call) as calls:
            saver.save(2, trainers, {"iteration": 2})
            saver.finish()
        (self._root / "calls").write_text("\n".join(calls))
        return 0

    def _load(self) -> int:
        saver, trainers = self._start(self._folder)
        state = saver.load(trainers)
        return 0 if state is None else int(state["iteration"])


@contextmanager
def file_calls(die_at: int) -> Iterator[list[str]]:
    """Record the names of the system calls and file calls, in all threads that start in the block. The
    process ends in place of call `die_at`."""
    calls: list[str] = []

    def see(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        kind = owner if isinstance(owner, type) else type(owner)
        module = getattr(function, "__module__", None) or kind.__module__
        if module in ("posix", "io", "_io") and not {function.__name__, kind.__name__} & {*NO_FILE}:
            calls.append(function.__qualname__)
            if len(calls) == die_at:
                os._exit(KILLED)

    threading.setprofile(see)
    sys.setprofile(see)
    yield calls
    sys.setprofile(None)
    threading.setprofile(None)
