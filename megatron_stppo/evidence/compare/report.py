"""The report of a grid: its contrasts as text, and one HTML page with them, a figure and the cells' means."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_stppo.base.files import replacing
from megatron_stppo.evidence.compare.contrasts import Contrast, contrasts
from megatron_stppo.evidence.compare.grid import Cell, Grid
from megatron_stppo.evidence.compare.results import Result
from megatron_stppo.evidence.compare.statistics import mean_interval

COLUMNS = ("contrast", "difference, 95 % interval", "seeds", "p", "p, Holm")
STYLE = """body { font: 15px system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0 2em; } td, th { padding: .25em .8em; text-align: right; }
th { border-bottom: 1px solid #888; } td:first-child, th:first-child { text-align: left; }
img { width: 100%; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } img { background: #fff; } }"""


def text(grid: Grid, found: Mapping[Cell, Result]) -> str:
    """Return the contrasts as a Markdown table per family."""
    lines = []
    for name, rows in _families(contrasts(grid, found)):
        lines += [f"{name}", "", *_markdown(COLUMNS, rows), ""]
    done = sum(cell in found for cell in grid.cells())
    return "\n".join([*lines, f"{done} of {len(grid.cells())} cells are done; outcome: {outcome_of(grid)}"])


def write(grid: Grid, found: Mapping[Cell, Result], path: Path) -> None:
    """Write the page. It needs only a browser."""
    given = contrasts(grid, found)
    parts = [f"<h1>{html.escape(path.stem)}</h1><p>Outcome: {html.escape(outcome_of(grid))}.</p>"]
    if any(one.differences for one in given):
        parts.append(f'<img alt="differences" src="data:image/png;base64,{_figure(given)}">')
    for name, rows in _families(given):
        parts.append(f"<h2>{html.escape(name)}</h2>{_table(COLUMNS, rows)}")
    parts.append("<h2>Mean of each arm in each setting, 95 % interval (seeds)</h2>")
    parts.append(_table(("arm", *grid.settings), list(_means(grid, found))))
    body = f"<!doctype html><meta charset=utf-8><title>compare</title><style>{STYLE}</style>{''.join(parts)}"
    with replacing(path) as scratch:
        scratch.write_text(body, encoding="utf-8")


def outcome_of(grid: Grid) -> str:
    """Return what is compared, in words."""
    of = grid.outcome
    within = (
        f", iterations {of.first} to {'the last' if of.last is None else of.last}"
        if of.first or of.last
        else ""
    )
    return f"{of.at} {of.metric}{within}"


def _families(given: Sequence[Contrast]) -> Iterator[tuple[str, list[list[str]]]]:
    for family, of in groupby(given, key=lambda one: one.family):
        margin = "" if family.margin is None else f", test of equivalence within {family.margin:g}"
        yield f"{family.family}{margin}{' (post hoc)' if family.post_hoc else ''}", [_row(one) for one in of]


def _row(one: Contrast) -> list[str]:
    if one.refused:
        return [one.label, f"refused: {one.refused}", "", "", ""]
    middle, half = one.effect
    effect = "no seed is complete" if math.isnan(middle) else _interval(middle, half, "+.3f")
    count = len(one.differences)
    seeds = str(count) if count == one.declared else f"{count} of {one.declared}"
    return [one.label, effect, seeds, _p(one.p), _p(one.holm)]


def _interval(middle: float, half: float, form: str) -> str:
    return f"{middle:{form}}" + ("" if math.isnan(half) else f" ± {half:{form.strip('+')}}")


def _p(p: float) -> str:
    return "not complete" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _means(grid: Grid, found: Mapping[Cell, Result]) -> Iterator[list[str]]:
    for arm in grid.arms:
        cells = [[Cell(arm, setting, seed) for seed in grid.seeds] for setting in grid.settings]
        values = [[found[cell].outcome for cell in of if cell in found] for of in cells]
        yield [arm, *(f"{_interval(*mean_interval(of), '.3f')} ({len(of)})" if of else "" for of in values)]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    every = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in every]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) for tag, cells in
             [("th", head), *(("td", row) for row in rows)]]  # fmt: skip
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _figure(given: Sequence[Contrast]) -> str:
    """Return a PNG in base64: every contrast's difference with its interval. Post hoc ones are hollow."""
    shown = [one for one in given if one.differences]
    figure = Figure(figsize=(9, 1 + 0.28 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axvline(0, color="0.6", linewidth=1)
    for place, one in enumerate(shown):
        middle, half = one.effect
        face = "white" if one.family.post_hoc else "C0"
        axes.errorbar(middle, -place, xerr=0 if math.isnan(half) else half, fmt="o", color="C0", mfc=face)
    axes.set_yticks([-n for n in range(len(shown))], [one.label for one in shown])
    axes.set_xlabel("difference, 95 % t interval over seeds (hollow: post hoc)")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130)
    return base64.b64encode(out.getvalue()).decode()
