"""The size of the project. The numbers only ever fall: what needs room makes room, by deletion and design.

The goals are 40,000 lines in 300 files for the package, 5,500 lines for tools/, 46,000 for tests/, and 42,000
words, of which the README has 900.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE, TOOLS, TESTS = (sorted((ROOT / name).rglob("*.py")) for name in ("megatron_stppo", "tools", "tests"))
README = [ROOT / "README.md"]
PAGES = [
    *README,
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / "docs").rglob("*.md"),
]


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


@pytest.mark.parametrize(
    ("what", "size", "budget"),
    [
        ("lines of the package", lines(PACKAGE), 47_000),
        ("files of the package", len(PACKAGE), 300),
        ("lines of tools/", lines(TOOLS), 6_547),
        ("lines of tests/", lines(TESTS), 49_486),
        ("words of README, CONTRIBUTING, SECURITY and docs/", words(PAGES), 40_330),
        ("words of the README", words(README), 897),
    ],
)
def test_the_project_stays_within_its_budgets(what: str, size: int, budget: int) -> None:
    assert size <= budget, f"{what}: make room by deletion and better design"
