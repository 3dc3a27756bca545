"""The structure of the package: which folders may import which, and where imports are placed."""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import megatron_stppo

ROOT = Path(megatron_stppo.__file__).parent
# The folders of the package in layers. A folder may import itself and folders of lower rows, but none of its
# own row. So environments do not depend on weights, nor agents on the training loop.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("algorithm",),
    ("config", "ops"),
    ("parallel",),
    ("data",),
    ("environments", "weights"),
    ("model",),
    ("families",),
    ("cluster",),
    ("checkpoint", "observe"),
    ("plan", "rollout", "validation"),
    ("agents",),
    ("training",),
    ("evidence", "replicas"),
    ("commands",),
    ("__init__", "__main__"),
)
LAYER = {unit: number for number, row in enumerate(LAYERS) for unit in row}
# These replace functions of torch, megatron or vLLM on a CPU, which offer no argument for it.
PLATFORM = {
    "parallel/cpu_platform.py",
    "rollout/vllm/cpu.py",
    "families/qwen3_next/cpu_engine.py",
}
# Streams of this process that print, for which Python has these names.
STREAMS = {("base/printing.py", "sys.stdout"), ("base/printing.py", "sys.stderr")}
# --help must not import torch. vLLM, the CPU platform and megatron must be imported in this order.
LAZY = {"commands", "cluster/launch/process.py", "parallel/cpu_platform.py"}


def test_modules_import_only_from_lower_layers() -> None:
    wrong = [
        f"{path} imports {target}"
        for path, target in edges()
        if target != unit_of(path) and LAYER[target] >= LAYER[unit_of(path)]
    ]
    assert not wrong


def test_the_two_sides_of_replicas_meet_only_on_the_wire() -> None:
    folders = {"wire": {"wire"}, "trainer": {"trainer", "wire"}, "replica": {"replica", "wire"}}
    for folder, allowed in folders.items():
        for path in (ROOT / "replicas" / folder).glob("*.py"):
            of_replicas = [name.split(".")[1:] for name in modules(parse(path.relative_to(ROOT)))]
            assert {parts[1] for parts in of_replicas if parts[0] == "replicas"} <= allowed, path


def test_every_file_belongs_to_a_layer() -> None:
    assert {unit_of(path) for path in sources()} <= set(LAYER)


def test_the_table_in_contributing_names_every_unit_and_follows_the_layers() -> None:
    lines = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    table = lines[lines.index("| folder | what it is |") + 2 :]
    rows = []
    for line in itertools.takewhile(lambda line: line.startswith("|"), table):
        units = [
            name.rstrip("/").removesuffix(".py") for name in re.findall(r"`([\w/.]+)`", line.split("|")[1])
        ]
        rows.append([unit for unit in units if unit != "csrc"])
    assert sorted(unit for row in rows for unit in row) == sorted(LAYER)
    assert [LAYER[row[0]] for row in rows] == sorted((LAYER[row[0]] for row in rows), reverse=True)


def test_no_two_classes_of_the_package_share_a_name() -> None:
    names = [
        node.name for path in sources() for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)
    ]
    assert sorted(names) == sorted(set(names))


def test_the_package_can_be_held_in_the_head() -> None:
    """At most 21 folders, 14 modules in a folder, and no module beside the folders."""
    modules = [path for path in sources() if path.name != "__init__.py"]
    in_folder = collections.Counter(path.parent for path in modules)
    assert len(LAYER) - 2 <= 21
    assert {str(path) for path in modules if path.parent == Path()} == {"__main__.py"}
    assert not {str(folder): count for folder, count in in_folder.items() if count > 14}


def test_no_folder_imports_a_folder_that_imports_it() -> None:
    """What a folder is divided into is layered too. The package itself (".") has the version."""
    of = {module_of(path): str(path.parent) for path in sources()}
    imports: dict[str, set[str]] = {}
    for path in sources():
        targets = {of[name] for name in modules(parse(path))} - {str(path.parent), "."}
        imports.setdefault(str(path.parent), set()).update(targets)
    assert circle(imports) == []


def test_the_mathematics_does_not_import_the_configuration() -> None:
    assert not [
        path for path, target in edges() if unit_of(path) in ("algorithm", "ops") and target == "config"
    ]


def test_no_file_has_a_meaningless_name() -> None:
    names = {part for path in sources() for part in path.with_suffix("").parts}
    assert not names & {"utils", "util", "common", "helpers", "core", "misc"}


def test_imports_are_at_the_top_of_their_file() -> None:
    wrong = []
    for path in sources():
        for function in ast.walk(parse(path)):
            if (
                isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
                and not {str(path), path.parts[0]} & LAZY
            ):
                wrong += [f"{path}:{node.lineno}" for node in ast.walk(function) if is_import(node)]
    assert not wrong


def test_the_training_loop_has_at_most_60_lines_and_a_phase_per_stage_in_order() -> None:
    tree = ast.parse((ROOT / "training/loop.py").read_text(encoding="utf-8"))
    (train,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
    assert train.end_lineno is not None and train.end_lineno - train.lineno < 60
    phases = [
        node.args[0].value
        for node in ast.walk(train)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "observer.phase"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert phases == ["rollout", "score", "advantage", "update", "reshard"]


def test_no_two_modules_import_each_other_not_even_for_types() -> None:
    """Also indirectly, and inside a unit, which the rows above do not order."""
    assert circle({module_of(path): set(modules(parse(path))) for path in sources()}) == []


def test_a_circle_of_imports_is_detected() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == ["a", "b", "c", "a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    tree = ast.parse(
        "if TYPE_CHECKING:\n    from megatron_stppo.model import build\nimport megatron_stppo.training.loop\n"
    )
    assert sorted(modules(tree)) == ["megatron_stppo.model.build", "megatron_stppo.training.loop"]


def test_only_the_platform_for_machines_without_a_gpu_replaces_functions_of_other_packages() -> None:
    wrong = [
        f"{path}: {name}"
        for path in sources()
        if str(path) not in PLATFORM
        for name in replaced(parse(path))
        if (str(path), name) not in STREAMS
    ]
    assert not wrong, "pass a function or an object instead"


def test_a_replaced_function_is_detected() -> None:
    text = """
import torch.distributed as dist
from torch.nn import functional
dist.Work.wait = timed
setattr(functional, "relu", relu)
del functional.gelu
self.functional = functional
"""
    assert list(replaced(ast.parse(text))) == ["dist.Work.wait", "functional.relu", "functional.gelu"]


def test_an_upward_import_is_detected() -> None:
    tree = ast.parse("from megatron_stppo import training\nimport megatron_stppo.model.build as build\n")
    assert sorted(targets(tree)) == ["model", "training"]


def sources() -> list[Path]:
    return [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py"))]


def unit_of(path: Path) -> str:
    return path.with_suffix("").parts[0]


def edges() -> list[tuple[Path, str]]:
    return [(path, target) for path in sources() for target in targets(parse(path))]


def targets(tree: ast.Module) -> Iterator[str]:
    """Yield the units of this package that a file imports, also in type-checking blocks and functions."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            unit = rest.partition(".")[0]
            if package == "megatron_stppo" and unit in LAYER:
                yield unit


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    return ".".join((ROOT.name, *path.with_suffix("").parts)).removesuffix(".__init__")


@functools.cache
def known_modules() -> frozenset[str]:
    return frozenset(map(module_of, sources()))


def modules(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of this package that a file names in its imports."""
    known = known_modules()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {name if name in known else node.module for name in inner} & known
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & known


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of a circle of imports, the first one also at the end; [] if there is none."""
    done: set[str] = set()

    def visit(module: str, above: list[str]) -> list[str]:
        if module in above:
            return [*above[above.index(module) :], module]
        if module in done:
            return []
        found = (visit(target, [*above, module]) for target in sorted(imports[module]))
        first = next((one for one in found if one), [])
        done.add(module)
        return first

    return next((found for module in imports if (found := visit(module, []))), [])


def replaced(tree: ast.Module) -> Iterator[str]:
    """Yield the attributes of imported modules and classes to which a file assigns."""
    nodes = list(ast.walk(tree))
    aliases = [
        alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    ]
    imported = {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if root(node) in imported:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            if root(node.args[0]) in imported:
                yield f"{ast.unparse(node.args[0])}.{ast.literal_eval(node.args[1])}"


def root(node: ast.AST) -> str:
    """Return the name at the start of an expression such as a.b.c; "" for other expressions."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)
