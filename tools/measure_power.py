"""How the ratios of turns shrink with their length: p of deviation(log w) ~ n^-p, from the records of runs.

A turn of n tokens has the clip bounds bound^(n^-p). With the p that is measured here, turns of every length
reach them equally often. Records of a policy that had not moved yet (w = 1) are left out.

Example: python tools/measure_power.py runs/quickstart runs/smollm2
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

import numpy as np

EDGES = (1, 3, 6, 12, 24, 48, 96, 192, 384, 768)  # of groups of turns by their number of tokens
LEAST = 20  # turns of a group


def turns(run: Path) -> np.ndarray:
    """Return the rows (number of the episode, tokens, log ratio) of a run's turns, float64 [turns, 3]."""
    rows = []
    for path in sorted((run / "trajectories").glob("*.turns.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            episode, records = len(rows), json.loads(line)["turns"]
            moved = [r for r in records if r["ratio"] not in (None, 1)]
            rows += [(episode, r["tokens"], math.log(r["ratio"])) for r in moved]
    return np.array(rows).reshape(-1, 3)


def groups(rows: np.ndarray) -> list[np.ndarray]:
    """Return (turns, mean of n, deviation of log w from 0) of each group that has LEAST turns or more."""
    within = (rows[(rows[:, 1] >= first) & (rows[:, 1] < last)] for first, last in itertools.pairwise(EDGES))
    return [
        np.array([len(of), of[:, 1].mean(), np.sqrt((of[:, 2] ** 2).mean())])
        for of in within
        if len(of) >= LEAST
    ]


def power(rows: np.ndarray) -> float:
    """Return p of the line through log deviation over log n, each group weighted by its number of turns."""
    number, n, deviation = np.stack(groups(rows), axis=1)
    slope, _ = np.polyfit(np.log(n), np.log(deviation), 1, w=np.sqrt(number))
    return -float(slope)


def interval(rows: np.ndarray, samples: int = 500) -> tuple[float, float]:
    """Return the 95 % interval of `power` by resampling episodes."""
    draw = np.random.default_rng(0)
    episodes = np.split(rows, np.flatnonzero(np.diff(rows[:, 0])) + 1)
    picks = (draw.integers(len(episodes), size=len(episodes)) for _ in range(samples))
    powers = [power(np.concatenate([episodes[i] for i in pick])) for pick in picks]
    low, high = np.quantile(powers, (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    for run in parser.parse_args().runs:
        rows = turns(run)
        low, high = interval(rows)
        print(f"{run.name}: {len(rows)} turns, p = {power(rows):.2f} (95 %: {low:.2f} to {high:.2f})")
        for number, n, deviation in groups(rows):
            times = f"times sqrt(n) {deviation * n**0.5:.3f}, times n {deviation * n:.3f}"
            print(f"  {n:5.1f} tokens: {number:5.0f} turns, deviation {deviation:.4f}, {times}")


if __name__ == "__main__":
    main()
