"""Change the sources in small ways, one change at a time, and list the changes that no test notices.

    python tools/mutate.py [--file SUBSTRING] [--sample N] [--seed 0]

A mutant is a source of SOURCES with one change, such as `<` for `<=`. A test of its row must fail, which
kills it. The exit status is 1 if a mutant survives that is not in tests/mutants.txt, where each has a reason.
No file is changed: a process that has imported torch, vLLM and megatron forks one process per mutant, which
compiles the changed source in memory and runs pytest. Results are in build/mutants.jsonl: an interrupted call
continues, and when the tests of a row have changed, only its survivors run again.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_stppo"
ARGUED, RESULTS = ROOT / "tests" / "mutants.txt", ROOT / "build" / "mutants.jsonl"
# Source: the tests that guard it, those that are fast first. Both without `test_` and `.py`.
SOURCES = {
    **{f"algorithm/{name}": [f"algorithm/{name}"] for name in ("aggregation", "correction", "gae", "rate")},
    "algorithm/baselines": ["training/advantage", "branches"],
    "algorithm/penalties": ["algorithm/penalties"],
    "algorithm/ratio": ["algorithm/ratio", "algorithm/surrogate"],
    "algorithm/selection": ["algorithm/selection"],
    "algorithm/step_memory": ["algorithm/correction", "algorithm/rate"],
    "algorithm/surrogate": ["algorithm/surrogate"],
    "algorithm/variants": ["algorithm/surrogate", "config/config", "documents"],
    "algorithm/vocabulary": ["ops/vocab_logprob", "ops/vocab_parallel"],
    "data/packing": ["data/packing", "data/routes", "data/exchange", "branches"],
    "replicas/trainer/ledger": ["replicas/ledger", "replicas/ledger_resampling", "replicas/lengths_trained"],
    "training/update/actor_step": [
        *(
            f"training/update/{name}"
            for name in ("ratios", "applied", "moves", "rates", "old_policy", "faults")
        )
    ],
    "training/update/critic_step": ["training/update/faults", "training/update/layouts"],
    "training/update/minibatches": ["training/update/minibatches", "training/update/ratios"],
    "training/update/ratios": ["training/update/ratios", "training/update/turns"],
    "training/update/turns": ["training/update/turns"],
    "weights/reshard/plan": ["weights/reshard/plan"],
}
JOBS = 2  # mutants at a time
PATIENCE, LEAST = (
    4,
    20.0,
)  # a test may take PATIENCE times as long as all of its row without a mutant, in seconds
# Imported once: what no mutant changes, and what changes torch and megatron when it is imported.
KEPT = (f"{PACKAGE}.cluster.launch", f"{PACKAGE}.parallel.cpu_platform")

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
        tree = ast.parse((ROOT / self.file).read_text())
        nodes = list(ast.walk(tree))
        changed = nodes[self.place]
        for parent in nodes:
            for name, value in ast.iter_fields(parent):
                if value is changed:
                    setattr(parent, name, self.node)
                elif isinstance(value, list):
                    value[:] = [self.node if one is changed else one for one in value]
        return compile(ast.fix_missing_locations(tree), self.file, "exec")


def mutants(file: str) -> list[Mutant]:
    """Return all mutants of a source, in the order of its lines."""
    source = (ROOT / file).read_text()
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
    if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr):
        yield node
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


def prepare(tests: Sequence[str]) -> None:
    """Import what the tests import and is not of this repository, so that forked processes have it."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.dont_write_bytecode = True
    process: Any = importlib.import_module(f"{PACKAGE}.cluster.launch.process")
    process.prepare()
    process.prepare = lambda engine=True, device="cpu": None  # it is
    reader, writer = os.pipe()
    if os.fork() == 0:
        for test in ("tests.preloaded", *tests):
            with suppress(Exception):
                importlib.import_module(test.removesuffix(".py").replace("/", "."))
        os.write(writer, json.dumps([name for name in sys.modules if not _is_ours(name)]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as names:
        for name in json.load(names):
            with suppress(Exception):
                importlib.import_module(name)
    os.wait()
    for name in [name for name in sys.modules if _is_ours(name) and not name.startswith(KEPT)]:
        del sys.modules[name]  # a forked process imports its own


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in (PACKAGE, "tests")


def fork(mutant: Mutant | None, tests: Sequence[str], limit: float) -> int:
    """Return the id of a new process that runs the tests with a mutant, and ends with pytest's status."""
    child = os.fork()
    if child:
        return child
    status = 3
    try:
        os.setsid()
        if mutant is not None:
            for output in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        status = _run_tests(mutant, tests, limit)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _run_tests(mutant: Mutant | None, tests: Sequence[str], limit: float) -> int:
    if mutant is not None:
        plain, file, code = SourceFileLoader.get_code, str(ROOT / mutant.file), mutant.code()
        loader: Any = SourceFileLoader
        loader.get_code = lambda self, name: code if self.path == file else plain(self, name)
    import pytest

    from tests import ranks

    # Ranks are forked from this process, so that they have the mutant too.
    ranks.context = lambda: ranks.mp.get_context("fork")
    return int(
        pytest.main(
            [
                "-x",
                "-qq",
                "-Wignore",
                "--durations=0",
                "-p",
                "no:cacheprovider",
                f"--timeout={limit:.0f}",
                *tests,
            ]
        )
    )


def run(waiting: Sequence[Mutant], tests: Sequence[str]) -> Iterator[tuple[Mutant, int]]:
    """Yield each mutant with the status of its tests. Raises SystemExit if they fail without a mutant."""
    left, running, started = list(reversed(waiting)), dict[int, Mutant](), time.monotonic()
    if left and os.waitpid(fork(None, tests, 600), 0)[1]:
        raise SystemExit("these tests fail without a mutant")
    limit = max(LEAST, PATIENCE * (time.monotonic() - started))
    while left or running:
        while left and len(running) < JOBS:
            mutant = left.pop()
            running[fork(mutant, tests, limit)] = mutant
        child, status = os.wait()
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its ranks
        yield running.pop(child), os.waitstatus_to_exitcode(status)


def argued() -> set[str]:
    """Return the keys in tests/mutants.txt: records of file and line, change, and reason."""
    records = [record.splitlines() for record in ARGUED.read_text().split("\n\n")]
    return {"\n".join(lines[:2]) for lines in records if len(lines) > 2}


def survivors(name: str, tests: Sequence[str], sample: int | None, seed: int) -> list[str]:
    """Run the mutants of a source that have no result yet, and return the keys of those that survive."""
    every = mutants(f"{PACKAGE}/{name}.py")
    chosen = {
        one.key for one in random.Random(f"{seed}/{name}").sample(every, min(sample or 10**9, len(every)))
    }
    found = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    known = {row["key"]: row for row in found}
    state = hashlib.sha256("".join((ROOT / test).read_text() for test in tests).encode()).hexdigest()[:16]
    done = {key for key, row in known.items() if row["killed"] or row["tests"] == state}
    waiting = [one for one in every if one.key in chosen - done]
    with RESULTS.open("a") as results:
        for mutant, status in run(waiting, tests):
            row = known[mutant.key] = {"key": mutant.key, "killed": status != 0, "tests": state}
            print(json.dumps(row), file=results, flush=True)
    lived = [one.key for one in every if one.key in chosen and not known[one.key]["killed"]]
    print(f"{name}: {len(every)} mutants, {len(chosen)} run, {len(lived)} survive", flush=True)
    return lived


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", default="", help="only sources whose path contains this")
    parser.add_argument("--sample", type=int, help="at most this many mutants of each source")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    given = parser.parse_args()
    files = {
        name: [f"tests/{Path(test).parent}/test_{Path(test).name}.py" for test in tests]
        for name, tests in SOURCES.items()
        if given.file in name
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.touch()
    prepare(sorted({test for tests in files.values() for test in tests}))
    lived = [key for name, tests in files.items() for key in survivors(name, tests, given.sample, given.seed)]
    unargued = [key for key in lived if key not in argued()]
    print(*(f"survives: {key}" for key in unargued), sep="\n")
    print(f"{len(lived)} survive, {len(lived) - len(unargued)} of them for a reason in tests/mutants.txt")
    return int(bool(unargued))


if __name__ == "__main__":
    sys.exit(main())
