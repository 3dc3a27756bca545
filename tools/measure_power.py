"""How the ratios of turns shrink with their length: the fitted p of |log w| ~ n^-p, from the records of runs.

A turn of n tokens has the clip bounds bound^(n^-p). With the p that is measured here, turns of every length
reach them equally often. Records of a policy that had not moved yet (w = 1) and of failed episodes are left out.

Example: python tools/measure_power.py runs/quickstart runs/smollm2
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def turns(run: Path) -> np.ndarray:
    """Return the rows (number of the episode, tokens, log ratio) of the turns of a run, float64 [turns, 3]."""
    rows = []
    for path in sorted((run / "trajectories").glob("*.turns.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            episode, records = len(rows), json.loads(line)["turns"]
            known = [r for r in records if r["ratio"] is not None and abs(r["ratio"] - 1) > 1e-6]
            rows += [(episode, r["tokens"], math.log(r["ratio"])) for r in known]
    return np.array(rows).reshape(-1, 3)


def power(rows: np.ndarray) -> float:
    """Return p of the least-squares line through log |log w| over log n."""
    slope, _ = np.polyfit(np.log(rows[:, 1]), np.log(np.abs(rows[:, 2])), 1)
    return -float(slope)


def interval(rows: np.ndarray, samples: int = 500) -> tuple[float, float]:
    """Return the 95 % interval of `power` by resampling episodes."""
    draw = np.random.default_rng(0)
    episodes = np.split(rows, np.flatnonzero(np.diff(rows[:, 0])) + 1)
    picks = (draw.integers(len(episodes), size=len(episodes)) for _ in range(samples))
    low, high = np.quantile([power(np.concatenate([episodes[i] for i in pick])) for pick in picks], (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    for run in parser.parse_args().runs:
        rows = turns(run)
        low, high = interval(rows)
        print(f"{run.name}: {len(rows)} turns, p = {power(rows):.2f} (95 %: {low:.2f} to {high:.2f})")
        for first, last in zip(EDGES, EDGES[1:], strict=False):
            inside = rows[(rows[:, 1] >= first) & (rows[:, 1] < last)]
            if len(inside) >= 10:
                deviation, n = inside[:, 2].std(), inside[:, 1].mean()
                print(f"  {first:3} to {last - 1:3} tokens: {len(inside):5} turns, deviation {deviation:.4f}, times sqrt(n) {deviation * n**0.5:.3f}, times n {deviation * n:.3f}")


if __name__ == "__main__":
    main()
