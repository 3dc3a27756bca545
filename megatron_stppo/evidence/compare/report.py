"""The report of a grid: its contrasts as text, and one HTML page with them, a figure and the cells' means."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_stppo.base.files import replacing
from megatron_stppo.evidence.compare.contrasts import Contrast, contrasts, mean_interval
from megatron_stppo.evidence.compare.grid import Cell, Grid
from megatron_stppo.evidence.compare.results import Found

Table = tuple[str, list[Sequence[str]]]  # title and rows, of which the first is the head
STYLE = """body { font: 15px system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0 2em; } td { padding: .25em .8em; text-align: right; }
tr:first-child { border-bottom: 1px solid #888; } td:first-child { text-align: left; } img { width: 100%; }"""


def text(grid: Grid, found: Found) -> str:
    """Return the contrasts as a Markdown table per family."""
    lines = []
    for title, (head, *rows) in _families(contrasts(grid, found)):
        every = [head, ["---"] * len(head), *rows]
        lines += [title, "", *(f"| {' | '.join(cells)} |" for cells in every), ""]
    done = sum(cell in found for cell in grid.cells())
    return "\n".join([*lines, f"{done} of {len(grid.cells())} cells are done; outcome: {_outcome(grid)}"])


def write(grid: Grid, found: Found, path: Path) -> None:
    """Write the page. It needs only a browser."""
    given = contrasts(grid, found)
    parts = [f"<h1>{escape(path.stem)}</h1><p>Outcome: {escape(_outcome(grid))}.</p>"]
    if any(one.differences for one in given):
        parts.append(f'<img alt="differences" src="data:image/png;base64,{_figure(given)}">')
    for title, rows in [*_families(given), _means(grid, found)]:
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        parts.append(f"<h2>{escape(title)}</h2><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
    body = f"<!doctype html><meta charset=utf-8><title>compare</title><style>{STYLE}</style>{''.join(parts)}"
    with replacing(path) as scratch:
        scratch.write_text(body, encoding="utf-8")


def _outcome(grid: Grid) -> str:
    of = grid.outcome
    return f"{of.at} {of.metric}, iterations {of.first} to {'the last' if of.last is None else of.last}"


def _families(given: Sequence[Contrast]) -> Iterator[Table]:
    head = ("contrast", "difference, 95 % interval", "seeds", "p, Holm")
    for family, of in groupby(given, key=lambda one: one.family):
        yield f"{family.family}{' (post hoc)' * family.post_hoc}", [head, *map(_row, of)]


def _row(one: Contrast) -> Sequence[str]:
    if one.refused:
        return one.label, f"refused: {one.refused}", "", ""
    effect = _interval(*one.effect, "+.3f") if one.differences else "no seed is complete"
    p = "not complete" if math.isnan(one.p) else f"{one.p:.3f}" if one.p >= 0.001 else "< 0.001"
    return one.label, effect, f"{len(one.differences)} of {one.declared}", p


def _interval(middle: float, half: float, form: str) -> str:
    return f"{middle:{form}}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def _means(grid: Grid, found: Found) -> Table:
    rows: list[Sequence[str]] = [("arm", *grid.settings)]
    for arm in grid.arms:
        cells = [[Cell(arm, setting, seed) for seed in grid.seeds] for setting in grid.settings]
        values = [[found[cell].outcome for cell in of if cell in found] for of in cells]
        shown = [f"{_interval(*mean_interval(of), '.3f')} ({len(of)})" if of else "" for of in values]
        rows.append((arm, *shown))
    return "Mean of each arm in each setting, 95 % interval (seeds)", rows


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
