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
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from mutations import ROOT, Mutant, mutants

PACKAGE = "megatron_stppo"
ARGUED, RESULTS = ROOT / "tests" / "mutants.txt", ROOT / "build" / "mutants.jsonl"
STEPS = ("applied", "rates", "faults", "layouts::test_segments_outside_the_bounds_leave_the_surrogate")
# Source: the tests that guard it, those that are fast first. Both without `test_` and `.py`. Left out are
# algorithm/variants.py, a table of settings, and algorithm/own.py, whose numbers are a test's.
SOURCES = {
    **{f"algorithm/{name}": [f"algorithm/{name}"] for name in ("aggregation", "correction", "rate")},
    "algorithm/gae": ["algorithm/gae", "branches"],
    "algorithm/baselines": ["algorithm/baselines", "training/advantage", "training/turn_credit", "branches"],
    "algorithm/penalties": ["algorithm/penalties"],
    "algorithm/ratio": ["algorithm/ratio", "algorithm/surrogate", "algorithm/aggregation"],
    "algorithm/selection": ["algorithm/selection"],
    "algorithm/surrogate": ["algorithm/surrogate", "ops/surrogate_hazards"],
    "algorithm/vocabulary": ["ops/vocab_logprob", "ops/vocab_parallel"],
    "data/packing": ["data/packing", "data/routes", "data/exchange", "branches"],
    "data/routes": ["data/routes", "data/prefixes", "data/packing"],
    "data/ledger": ["data/ledger", "replicas/ledger", "replicas/ledger_resampling"],
    "replicas/trainer/ledger": [
        f"replicas/{name}" for name in ("ledger", "ledger_resampling", "evaluation", "hub")
    ],
    "training/update/actor_step": ["training/update/ratios", *(f"training/update/{name}" for name in STEPS)],
    "training/update/critic_step": ["training/update/faults"],
    "data/division": [
        "data/division",
        "data/prefixes",
        "data/exchange",
        "training/update/ratios",
        "training/update/trees",
    ],
    "training/update/own": ["training/update/own", "validation/checks"],
    "training/update/ratios": ["training/update/ratios", "training/update/turns"],
    "weights/reshard/plan": ["weights/reshard/plan"],
}
JOBS = 2  # mutants at a time
PATIENCE, LEAST = 4, 20.0  # times the seconds of the row without a mutant, which is at least LEAST
# Imported once: what no mutant changes, and what changes torch and megatron when it is imported.
KEPT = (f"{PACKAGE}.cluster.launch", f"{PACKAGE}.parallel.cpu_platform")


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
                importlib.import_module(test.partition(".py")[0].replace("/", "."))
        os.write(writer, json.dumps([name for name in sys.modules if not _is_ours(name)]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as names:
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
    try:
        while left or running:
            while left and len(running) < JOBS:
                mutant = left.pop()
                running[fork(mutant, tests, limit)] = mutant
            child, status = os.wait()
            _end(child)  # its ranks
            yield running.pop(child), os.waitstatus_to_exitcode(status)
    finally:
        for child in running:  # after SIGTERM or Ctrl-C
            _end(child)


def _end(child: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def argued() -> set[str]:
    """Return the keys in tests/mutants.txt: records of file and line, change, and reason."""
    records = [record.splitlines() for record in ARGUED.read_text(encoding="utf-8").split("\n\n")]
    return {"\n".join(lines[:2]) for lines in records if len(lines) > 2}


def survivors(name: str, tests: Sequence[str], sample: int | None, seed: int) -> list[str]:
    """Run the mutants of a source that have no result yet, and return the keys of those that survive."""
    every = mutants(f"{PACKAGE}/{name}.py")
    chosen = {
        one.key for one in random.Random(f"{seed}/{name}").sample(every, min(sample or 10**9, len(every)))
    }
    found = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    known = {row["key"]: row for row in found}
    texts = ((ROOT / test.partition("::")[0]).read_bytes() for test in tests)
    state = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
    done = {key for key, row in known.items() if row["killed"] or row["tests"] == state}
    waiting = [one for one in every if one.key in chosen - done]
    with RESULTS.open("a", encoding="utf-8") as results:
        for mutant, status in run(waiting, tests):
            row = known[mutant.key] = {"key": mutant.key, "killed": status != 0, "tests": state}
            print(json.dumps(row), file=results, flush=True)
    lived = [one.key for one in every if one.key in chosen and not known[one.key]["killed"]]
    print(f"{name}: {len(every)} mutants, {len(chosen)} run, {len(lived)} survive", flush=True)
    return lived


def _path(test: str) -> str:
    """Return what pytest runs. Example: "tests/a/test_b.py::test_c" for "a/b::test_c"."""
    name, *one = test.split("::")
    return "::".join([f"tests/{Path(name).parent}/test_{Path(name).name}.py", *one])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", default="", help="only sources whose path contains this")
    parser.add_argument("--sample", type=int, help="at most this many mutants of each source")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    files = {name: [*map(_path, tests)] for name, tests in SOURCES.items() if given.file in name}
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
