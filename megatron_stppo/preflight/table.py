"""Print the rows of a cluster check as a table, and write them as JSON with the records behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_stppo.atomic_replace import replacing
from megatron_stppo.preflight.records import Facts, Together
from megatron_stppo.preflight.rows import CheckRow

COLOUR = {"pass": "green", "fail": "red", "not checked": "yellow"}
SHOWN = 4  # failing ranks per row; the JSON file has all


def show(rows: Sequence[CheckRow], console: Console) -> None:
    """Print the table, then one line with the number of rows per verdict."""
    table = Table(
        "check", "value", "limit", "verdict", title="megatron-stppo doctor --cluster", title_justify="left"
    )
    table.add_column("who fails, and what to do", ratio=1)
    for row in rows:
        verdict = f"[{COLOUR[row.verdict]}]{row.verdict}[/]"
        table.add_row(escape(row.name), escape(row.value), escape(row.limit), verdict, escape(_what(row)))
    console.print(table)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in COLOUR}
    console.print(f"{counts['pass']} pass, {counts['fail']} fail, {counts['not checked']} not checked")


def write(
    path: Path,
    rows: Sequence[CheckRow],
    limits: Mapping[str, float],
    facts: Mapping[int, Facts],
    together: Mapping[int, Together],
) -> None:
    """Write {"passed", "rows", "limits", "facts", "together"}, the last two as lists in rank order."""
    content = {
        "passed": passed(rows),
        "rows": [asdict(row) for row in rows],
        "limits": dict(limits),
        "facts": [asdict(facts[rank]) for rank in sorted(facts)],
        "together": [asdict(together[rank]) for rank in sorted(together)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def passed(rows: Sequence[CheckRow]) -> bool:
    """Return whether no row fails. Rows that are not checked do not count."""
    return all(row.verdict != "fail" for row in rows)


def _what(row: CheckRow) -> str:
    """Return the failing ranks, then the remedy, each on a line of its own."""
    more = [f"and {len(row.who) - SHOWN} more"] if len(row.who) > SHOWN else []
    return "\n".join([*row.who[:SHOWN], *more, *([row.remedy] if row.remedy else [])])
