"""Messages to the user: text from outside that is safe to print, hints for misspelled names, and outputs that
cannot be written."""

import difflib
import io
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, TextIO

MAX_LINE = 200  # characters of foreign text in one line


def say(text: str, enabled: bool = True) -> None:
    """Print one line on stderr; ranks > 0 pass enabled=False."""
    if enabled:
        print(f"megatron-stppo: {text}", file=sys.stderr, flush=True)


def printable(text: Any) -> str:
    """Return foreign text that is safe to print on a terminal.

    Line breaks stay; control and text-direction characters become spaces.
    """
    return "".join(c if c.isprintable() or c == "\n" else " " for c in str(text))


def one_line(text: str) -> str:
    """Return foreign text that is safe to print, as one line of at most MAX_LINE characters."""
    return printable(text[:MAX_LINE]).replace("\n", " ")


class Printable(logging.Formatter):
    """A formatter whose lines are those of `inner`, made safe to print. Tracebacks quote foreign text too."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return printable(self._inner.format(record))


def did_you_mean(name: str, known: Iterable[str], shown: str = "{}") -> str:
    """Return a question about the known name that is most similar to `name`, or "" if none is similar.

    shown: how the question writes a name, with "{}" in its place.
    Example: did_you_mean("sed", ["seed", "root"], "run.{}") is "did you mean run.seed?".
    """
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {shown.replace('{}', near[0])}?" if near else ""


class Droppable(io.FileIO):
    """A file or pipe that drops what it cannot write, because its reader has ended or its disk is full."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data) or memoryview(data).nbytes  # None: a pipe that must not wait is full
        return memoryview(data).nbytes


def drop_unwritable(*names: Literal["stdout", "stderr"]) -> None:
    """Replace the outputs of this process: those named raise no error. Call it before anything has printed.

    print, logging, warnings and progress bars write to sys.stdout and sys.stderr, and would end the run. Both
    write characters that the encoding lacks as escapes.
    """
    sys.stdout = _rewritten(sys.stdout, 1, "stdout" in names)
    sys.stderr = _rewritten(sys.stderr, 2, "stderr" in names)


def _rewritten(stream: TextIO | None, number: int, drops: bool) -> TextIO:
    """Return a stream like `stream`, which is None if it is closed. number: its file descriptor."""
    if stream is None:  # the next file that is opened would be this output of the C libraries
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    raw = (Droppable if drops else io.FileIO)(number, "w", closefd=False)
    unbuffered = getattr(stream, "write_through", False)
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=getattr(stream, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=getattr(stream, "line_buffering", True),
        write_through=unbuffered,
    )
