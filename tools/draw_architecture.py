"""Draw docs/architecture.svg: the folders of the package in layers, and the way of a batch through them.

    python tools/draw_architecture.py [--check]

The text of a folder is the first line of its docstring. A folder stands above all
folders that it imports; a line leads down to each of them that no other imported folder imports too.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_stppo"
PICTURE = ROOT / "docs" / "architecture.svg"
WIDTH, BOX, HEIGHT, GAP = 660, (204, 40), 63, 14
# the folders that a batch visits in an iteration, and what happens there
FLOW = (("rollout", "1 play"), ("training", "2 score, advantage, update"), ("weights", "3 reshard"))
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; }
.name { font-weight: 600; font-size: 13px; } .step { font-size: 11px; font-weight: 600; fill: #bc4c00; }
rect { fill: #ffffff; stroke: #8c959f; rx: 7px; } .flow rect { stroke: #bc4c00; stroke-width: 2; }
path { stroke: #afb8c1; fill: none; }
.page { fill: #f6f8fa; stroke: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } rect { fill: #161b22; stroke: #57606a; } path { stroke: #3d444d; }
  .page { fill: #0d1117; } .step { fill: #ffa657; } .flow rect { stroke: #ffa657; }
}
"""


def folders() -> dict[str, str]:
    """Return {folder: first line of its docstring}."""
    files = sorted(PACKAGE.glob("*/__init__.py"))
    return {
        path.parent.name: (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[
            0
        ]
        for path in files
    }


def imports(names: Sequence[str]) -> dict[str, set[str]]:
    """Return {folder: folders that its files import}."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for name in names:
        for path in (PACKAGE / name).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                parts = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                parts += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                found[name] |= {part.split(".")[1] for part in parts if part.startswith("megatron_stppo.")}
        found[name] &= set(names) - {name}
    return found


def layers(of: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the folders of each layer, the lowest first: one above the highest folder that it imports."""

    @cache
    def layer(name: str) -> int:
        return 1 + max((layer(other) for other in of[name]), default=-1)

    return [
        sorted(name for name in of if layer(name) == number)
        for number in range(len(of))
        if number in map(layer, of)
    ]


def direct(of: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports without those that another imported folder has too, also indirectly."""

    @cache
    def below(name: str) -> frozenset[str]:
        return frozenset(of[name]).union(*(below(other) for other in of[name]))

    return {
        name: {o for o in others if not any(o in below(x) for x in others)} for name, others in of.items()
    }


def draw() -> str:
    """Return the picture as SVG text."""
    texts = folders()
    of = imports(list(texts))
    rows = layers(of)
    height = len(rows) * HEIGHT + GAP
    at = {}
    for number, row in enumerate(rows):
        left = (WIDTH - len(row) * (BOX[0] + GAP) + GAP) / 2
        for place, name in enumerate(row):
            at[name] = (left + place * (BOX[0] + GAP), height - (number + 1) * HEIGHT + GAP)
    lines = [f'<rect class="page" width="{WIDTH}" height="{height}"/>']
    for name, others in direct(of).items():
        for other in sorted(others):
            (x, y), (a, b) = at[name], at[other]
            x, y, a = x + BOX[0] / 2, y + BOX[1], a + BOX[0] / 2
            lines.append(f'<path d="M{x:g} {y:g} C{x:g} {y + 26:g} {a:g} {b - 26:g} {a:g} {b:g}"/>')
    steps = dict(FLOW)
    for name, (x, y) in at.items():
        kind = ' class="flow"' if name in steps else ""
        middle = x + BOX[0] / 2
        lines.append(f'<g{kind}><rect x="{x:g}" y="{y:g}" width="{BOX[0]}" height="{BOX[1]}"/>')
        lines.append(f'<text class="name" x="{middle:g}" y="{y + 16:g}">{name}</text>')
        lines.append(f'<text x="{middle:g}" y="{y + 32:g}">{escape(texts[name].rstrip("."))}</text>')
        if name in steps:
            lines.append(f'<text class="step" x="{middle:g}" y="{y - 5:g}">{steps[name]}</text>')
        lines.append("</g>")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args(argv).check:
        return int(PICTURE.read_text(encoding="utf-8") != draw())
    PICTURE.write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
