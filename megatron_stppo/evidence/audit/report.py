"""What `audit` prints, and its exit code."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron_stppo.evidence.audit.limits import TOKENS, Resemblance
from megatron_stppo.evidence.audit.records import Records
from megatron_stppo.observe.console import say

PASSED, DIFFERS, DAMAGED, CRASHED = 0, 1, 3, 70  # exit codes
WORST, LINES = 10, 20  # tokens that are listed; lines of damage
NOT_CHECKED = (
    "not checked: whether tokens were drawn with these probabilities, observations and rewards against the "
    "environment, and the updates (`megatron-stppo replay`)"
)


@dataclass(frozen=True)
class Token:
    """A token whose log-prob is far from the trainer's.

    Example: Token(1.3, -2.0, -2.4, "iteration 4, line 17, turn 2, token 5").
    """

    excess: float  # difference / limit
    engine: float  # nats, as the following
    trainer: float
    place: str


@dataclass(frozen=True)
class VersionFinding:
    """How the engine's log-probs of one version's tokens differ from the trainer's, in nats."""

    version: int
    tokens: int
    mean: float
    most: float  # that the mean may be
    limit: float  # of a token: the median
    beyond: int  # tokens beyond their limit
    # by version, of the iteration that is most like it, or of all together; None: cannot be compared
    others: Mapping[int, Resemblance | None]
    worst: Sequence[Token]

    @property
    def reasons(self) -> list[str]:
        """Why the version fails. A mean of few tokens is not compared."""
        like = [f"like version {v}" for v, given in self.others.items() if given and given.differs]
        single = [f"{self.beyond} beyond"] if self.beyond else []
        mean = ["mean"] if self.tokens >= TOKENS and not self.mean <= self.most else []  # NaN fails
        return single + mean + like


def exit_code(findings: Sequence[VersionFinding], damage: Sequence[str]) -> int:
    differs = any(finding.reasons for finding in findings)
    return DAMAGED if damage else DIFFERS if differs else PASSED


def show(
    findings: Sequence[VersionFinding],
    found: Records,
    versions: Collection[int],
    single: bool,
) -> None:
    """Print everything. versions: that tokens name. single: whether single tokens have limits."""
    damage = found.damage
    console = Console(width=None if Console().is_terminal else 120)
    if findings:
        console.print(_versions(findings))
        console.print(_worst(findings))
    for line in [*damage[:LINES], *([f"{len(damage) - LINES} lines more"] if len(damage) > LINES else [])]:
        say(f"damaged: {line}")
    for line in notes(found):
        say(line)
    if left := sorted(set(versions) - {finding.version for finding in findings}):
        say(f"versions without a readable checkpoint, whose tokens are not audited: {_ranges(left)}")
    if not single:
        say("single tokens have no limit: in bfloat16, engine and trainer may choose different experts")
    say(NOT_CHECKED)
    said = f"{sum(finding.tokens for finding in findings)} of {found.tokens} tokens audited"
    verdicts = {PASSED: "passed", DIFFERS: "FAILED: log-probs differ", DAMAGED: "FAILED: damaged records"}
    code = exit_code(findings, damage)
    also = ", and log-probs differ" if code == DAMAGED and exit_code(findings, ()) else ""
    say(f"{verdicts[code]}{also}; {said}")


def notes(found: Records) -> list[str]:
    """Return a line for each reason why iterations are not audited, or not compared."""
    return [f"iterations {_ranges(iterations)}: {reason}" for reason, iterations in found.notes.items()]


def _versions(findings: Sequence[VersionFinding]) -> Table:
    columns = ("version", "tokens", "mean", "limit", "median limit of a token", "like others", "differs")
    table = Table(*columns, title="difference of engine and trainer by version, nats")
    for found in findings:
        like = [
            f"{v}: {given.share:.2f} ± {given.error:.2f}" if given else f"{v}: -"
            for v, given in found.others.items()
        ]
        numbers = (f"{found.mean:.2g}", f"{found.most:.2g}", f"{found.limit:.2g}")
        named = str(found.version), str(found.tokens)
        table.add_row(*named, *numbers, "; ".join(like), ", ".join(found.reasons))
    return table


def _worst(findings: Sequence[VersionFinding]) -> Table:
    columns = ("at", "version", "engine", "trainer", "difference / limit")
    table = Table(*columns, title=f"the {WORST} worst tokens, log-probs in nats")
    every = [(token, found.version) for found in findings for token in found.worst]
    for token, version in heapq.nlargest(WORST, every, key=lambda one: one[0].excess):
        numbers = (f"{token.engine:.4g}", f"{token.trainer:.4g}", f"{token.excess:.2g}")
        table.add_row(token.place, str(version), *numbers)
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers with ranges. Example: [1, 2, 3, 7] gives "1-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(a[0]) if len(a) == 1 else f"{a[0]}-{a[-1]}" for a in parts)
