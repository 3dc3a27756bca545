"""Parts of messages to the user: text from outside that is safe to print, and hints for misspelled names."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from typing import Any

MAX_LINE = 200  # characters of foreign text in one line


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
