"""Measure what it saves to compute common prefixes once: tokens, seconds of score and update, memory.

    python tools/benchmark_trees.py [--cases search,instructed,bfcl,compacting] [--model tiny|slice|FOLDER]
        [--from RUN_DIR --iteration N] [--tasks N] [--budgets 2048,4096,16384] [--timed 16384] [--rounds 3]
        [--preset st_ppo] [--trl 8,16] [--steps 1] [--threads N] [--device cpu|cuda]
        [--output runs/trees] [--table] [--results FILE]

The cases are described in tools/trees/rollouts.py; --tasks is the number of tasks of bfcl (default: 4) and
compacting (2). With --from, the trajectories of a run are the only case. `tiny` and `slice` are random Qwen3
models (tools/trees/worker.py); `slice` needs a GPU. FOLDER is a Hugging Face folder.

The tokens are counted for each of --budgets, numbers of tokens_per_microbatch. The rest is measured with
--timed of them: first, log-probs with and without sharing are compared, and the first ratios must be 1. Then
every round scores and updates without and with update.share_prefixes, in one process. On a CPU, the peak
memory of each is that of a process of its own. --rounds 0 only counts.

--trl adds TRL's GRPO on the same episodes, with so many trajectories per forward pass, in the environment of
tools/benchmark_peers.py. Ours is then grpo, which has no critic either; generation is left out of both.
Each round starts new processes of both in turn; the first iteration of a process is left out. The update is
divided into --steps optimizer steps; with one, neither computes the old log-probs in a pass of its own.

Prints tables and writes trees.json to the output folder; --table only prints the tables of that file, and
--results writes its most important numbers to a file, for check_gpu. The machine must be idle. Exits with 1
if a check or a process fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from tools import processes
from tools.measuring import machine
from tools.peers.cases import Start
from tools.peers.run import trained_by_trl
from tools.processes import ROOT
from tools.trees import report
from tools.trees.rollouts import CASES
from tools.trees.worker import ARMS, SIZES, played_of


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    file = output / "trees.json"
    try:
        if not given.table:
            record = {"machine": machine(given.device) | {"threads": given.threads}, "model": given.model}
            record |= {name: getattr(given, name) for name in ("preset", "timed", "steps")} | {"cases": {}}
            for case in given.cases:
                record["cases"][case] = Case(given, case, output).measured()
                file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except RuntimeError as error:
        print(f"benchmark_trees: {error}", file=sys.stderr)
        return 1
    record = json.loads(file.read_text(encoding="utf-8"))
    print(report.tables(record))
    if given.results is not None:
        given.results.write_text(json.dumps(report.summary(record)), encoding="utf-8")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--model", default="tiny", help="tiny, slice or a Hugging Face folder")
    parser.add_argument("--from", dest="run", type=Path, help="the folder of a run")
    parser.add_argument("--iteration", type=int, default=1, help="of --from")
    parser.add_argument("--tasks", type=int, default=0)
    parser.add_argument("--budgets", type=numbers, default=[2048, 4096, 16384])
    parser.add_argument("--timed", type=int, default=16384, help="tokens_per_microbatch of the measurements")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--preset", default="st_ppo", help="algorithm.preset, without --trl")
    parser.add_argument("--trl", type=numbers, default=[], help="trajectories per forward pass of TRL")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of an update")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/trees")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--results", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    if unknown := [case for case in given.cases if case not in CASES]:
        parser.error(f"--cases={unknown[0]}: no such case; choose from {', '.join(CASES)}")
    if given.run is not None:
        given.cases = [given.run.name]
    return given


def numbers(text: str) -> list[int]:
    """Example: "2048,4096" is [2048, 4096]."""
    return [int(part) for part in text.split(",")]


class Case:
    """The measurements of one case."""

    def __init__(self, given: argparse.Namespace, case: str, output: Path) -> None:
        self._given, self._case, self._output = given, case, output
        model, run = given.model, given.run
        self._spec: dict[str, Any] = {
            "case": case,
            "tasks": given.tasks,
            "run": None if run is None else str(run.resolve()),
            "iteration": given.iteration,
            "model": str(output / model if model in SIZES else Path(model).resolve()),
            "size": model if model in SIZES else "",
            "budget": given.timed,
            "preset": "grpo" if given.trl else given.preset,
            "steps": given.steps,
            "old_logprob": "auto" if given.trl else "score",
            "rounds": given.rounds,
        }
        self._played = played_of(self._spec)

    def measured(self) -> dict[str, Any]:
        given, found = self._given, {"counts": report.counts(self._played, self._given.budgets)}
        if given.trl:
            return found | self._beside_trl()
        if given.rounds:
            found |= self._work("times")
            found.setdefault("peak", {}).update(self._peaks() if given.device == "cpu" else {})
        return found

    def _beside_trl(self) -> dict[str, Any]:
        """Return {"off": .., "on": .., "TRL/8": .., "peak": ..}, where TRL takes 8 trajectories at a time."""
        found = dict[str, Any]()
        for _ in range(self._given.rounds):
            of_round = self._work("times", rounds=1)
            found["check"] = of_round.pop("check")
            for amount in self._given.trl:
                self._say(f"TRL/{amount}")
                start = Start(1, self._given.threads, amount)
                trl = trained_by_trl(self._for_trl(amount), self._output, start)
                of_round[f"TRL/{amount}"] = [{"update": x.pop("seconds")} | x for x in trl["iterations"]]
                peaks = found.setdefault("peak", {})
                peaks[f"TRL/{amount}"] = max(trl["peak"], peaks.get(f"TRL/{amount}", 0))
            for name, rows in of_round.items():
                found.setdefault(name, []).extend(rows)
        found["peak"] |= self._peaks()
        return found

    def _peaks(self) -> dict[str, int]:
        return {arm: self._work("memory", arm=arm)["peak"] for arm in ARMS}

    def _for_trl(self, amount: int) -> dict[str, Any]:
        episodes = []
        for played in self._played:
            ids, mask = list[int](), list[int]()
            for turn in played.turns:
                ids += turn.token_ids + turn.observation_ids
                mask += [1] * len(turn.token_ids) + [0] * len(turn.observation_ids)
            episodes.append([played.prompt_ids, ids, mask])
        samples = sum(played.group == self._played[0].group for played in self._played)
        return {
            "model": self._spec["model"],
            "lora": 0,
            "threads": self._given.threads,
            "amount": amount,
            "turns": 1,
            "turn_tokens": 1,
            "tasks": len(episodes) // samples,
            "samples": samples,
            "trajectories": len(episodes),
            "steps": self._given.steps,
            "iterations": 2,
            "episodes": episodes,
            "rewards": [played.reward for played in self._played],
        }

    def _work(self, work: str, **more: Any) -> dict[str, Any]:
        """Return the results of a worker. Raises RuntimeError with the end of its output."""
        self._say(work)
        spec, result = self._output / "specification.json", self._output / "result.json"
        spec.write_text(json.dumps(self._spec | {"work": work} | more), encoding="utf-8")
        environment = {"OMP_NUM_THREADS": str(self._given.threads)}
        if self._given.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        line = [sys.executable, "-m", "tools.trees.worker", spec, result]
        processes.run(line, environment, log=self._output / "worker.log")
        return json.loads(result.read_text(encoding="utf-8"))

    def _say(self, work: str) -> None:
        print(f"{self._case}: {work}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
