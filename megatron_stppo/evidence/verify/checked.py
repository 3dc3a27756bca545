"""The result of one check of `verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "fails", "skipped"]


@dataclass(frozen=True)
class Checked:
    """One line of the table.

    Example: Checked("first ratio is 1", "ok", "2,412 tokens, largest difference 0").
    """

    check: str
    verdict: Verdict
    measured: str  # the numbers and their limits, or why the check was skipped
    remedy: str = ""  # where it fails: the field to look at, and what to do

    def __str__(self) -> str:
        remedy = f"\n{'':10}{self.remedy}" if self.remedy else ""
        return f"{self.verdict:9} {self.check:32} {self.measured}{remedy}"


def judged(check: str, holds: bool, measured: str, remedy: str) -> Checked:
    """Return the finding of a check that ran. remedy: for one that fails."""
    return Checked(check, "ok", measured) if holds else Checked(check, "fails", measured, remedy)
