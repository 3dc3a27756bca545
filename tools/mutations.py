"""The small changes of a source file: its mutants."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[1]
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Add: ast.Sub},
    **{ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult},
    ast.Pow: ast.Mult,
}
RENAMED = {"min": "max", "max": "min", "amax": "amin", "maximum": "minimum", "all": "any", "any": "all"}
# Functions and methods that return a changed argument or receiver: the mutant has that itself.
LEFT_OUT = {"clamp", "masked_fill", "square", "sqrt", "exp", "abs", "detach", "cumsum", "diff", "sorted"}
NO_EFFECT = {"device", "output_size", "strict"}  # keywords that change no result on one device


@dataclass(frozen=True)
class Mutant:
    """One change of a source. Example: file "megatron_stppo/x.py", line "if size < 2:", change "2 -> 3"."""

    file: str
    line: str  # of the source, without blanks around it
    change: str
    place: int  # of the changed node in ast.walk
    node: ast.AST  # that takes its place

    @property
    def key(self) -> str:
        return f"{self.file}: {self.line}\n    {self.change}"

    def code(self) -> CodeType:
        """Return the compiled source with the change."""
        tree = ast.parse((ROOT / self.file).read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        changed = nodes[self.place]
        for parent in nodes:
            for name, value in ast.iter_fields(parent):
                if value is changed:
                    setattr(parent, name, self.node)
                elif isinstance(value, list):
                    value[:] = [self.node if one is changed else one for one in value]
        loader = SourceFileLoader("", self.file)
        return loader.source_to_code(ast.fix_missing_locations(tree), self.file)  # type: ignore[arg-type]


def mutants(file: str) -> list[Mutant]:
    """Return all mutants of a source, in the order of its lines."""
    source = (ROOT / file).read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    nodes = list(ast.walk(tree))
    left = {id(node) for top in nodes for part in _no_effect(top) for node in ast.walk(part)}
    found = [
        (node.lineno, place, Mutant(file, lines[node.lineno - 1].strip(), _change(node, other), place, other))
        for place, node in enumerate(nodes)
        if id(node) not in left and isinstance(node, ast.expr | ast.stmt)
        for other in _replacements(node)
    ]
    ordered, seen = [], Counter[str]()
    for _, _, mutant in sorted(found, key=lambda one: one[:2]):
        seen[mutant.key] += 1
        number = f" #{seen[mutant.key]}" if seen[mutant.key] > 1 else ""
        ordered.append(replace(mutant, change=mutant.change + number))
    return ordered


def _change(node: ast.AST, other: ast.AST) -> str:
    return " -> ".join(" ".join(ast.unparse(one).split()) for one in (node, other))


def _no_effect(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts that are not changed: errors, checks that only a bug fails, annotations, decorators."""
    if isinstance(node, ast.Assert | ast.Raise):
        yield node
    if isinstance(node, ast.keyword) and node.arg in NO_EFFECT:
        yield node.value
    yield from (part for name in ("annotation", "returns") if (part := getattr(node, name, None)) is not None)
    yield from getattr(node, "decorator_list", ())


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that take the place of `node`, one per mutant."""
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            yield _with(node, "ops", [*node.ops[:at], SWAPS[type(operator)](), *node.ops[at + 1 :]])
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        yield _with(node, "op", SWAPS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield ast.Constant(_other(node.value))
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.If | ast.While):
        yield _with(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.JoinedStr):
        for at, part in enumerate(node.values):
            if isinstance(part, ast.FormattedValue):
                yield _with(node, "values", node.values[:at] + node.values[at + 1 :])
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    if _is_removable(node):
        yield ast.Pass()


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    field, function = ("id" if isinstance(node.func, ast.Name) else "attr"), node.func
    name = getattr(function, field, None)
    if name in RENAMED:
        yield _with(node, "func", _with(function, field, RENAMED[name]))
    elif name in LEFT_OUT:
        yield function.value if isinstance(function, ast.Attribute) else node.args[0]
    for at, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in NO_EFFECT:
            yield _with(node, "keywords", node.keywords[:at] + node.keywords[at + 1 :])


def _is_removable(node: ast.AST) -> bool:
    """Return whether all names are still there without this statement."""
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        used = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
        return target.id in used if isinstance(target, ast.Name) else not isinstance(target, ast.Tuple)
    return isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )


def _with(node: ast.AST, field: str, value: object) -> ast.AST:
    other = copy.copy(node)
    setattr(other, field, value)
    return other


def _other(value: bool | int | float) -> bool | int | float:
    if value in (0, 1):  # also False and True
        return type(value)(1 - value)
    return value + 1 if isinstance(value, int) else value * 2
