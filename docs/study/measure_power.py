"""How the ratios of turns shrink with their length: p of deviation(log w) ~ n^-p, from the records of runs.

A turn of n tokens has the clip bounds bound^(n^-p). With the p that is measured here, turns of every length
reach them equally often. The ratios are those of a run's updates, without those of a policy that had not
moved yet (w = 1). With --under they are those of the recorded tokens under other weights: of a later version
(age), or the same ones in another dtype (engine noise).

Examples, from the folder of this repository:

    python docs/study/measure_power.py runs/quickstart runs/chain-sums
    python docs/study/measure_power.py runs/smollm2 --under runs/smollm2/cold-start --dtype bfloat16
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

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


def scored(run: Path, iteration: int, folder: Path, dtype: str) -> np.ndarray:
    """Return such rows of one iteration's turns, for the log-probs under a folder's weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    path = run / "trajectories" / f"iteration-{iteration:05d}.jsonl"
    rows = []
    for episode, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        record = json.loads(line)
        tokens, spans = list(record["prompt_ids"]), []
        for turn in record["turns"]:
            spans.append((len(tokens), turn["rollout_logprob"]))
            tokens += turn["token_ids"] + turn["observation_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, :-1].float()
        logprob = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].double().numpy()
        for start, recorded in spans:
            n = len(recorded)
            rows.append((episode, n, (logprob[start - 1 : start - 1 + n] - recorded).mean()))
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
    """Return p of the line through log deviation over log n, each group weighted by its number of turns.

    NaN if turns of all lengths are one group.
    """
    if len(groups(rows)) < 2:
        return math.nan
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
    parser.add_argument("--under", type=Path, help="folder of other weights, in the format of Hugging Face")
    parser.add_argument("--iteration", type=int, default=1, help="whose tokens, with --under")
    parser.add_argument("--dtype", default="float32", help="of the model, with --under")
    options = parser.parse_args()
    for run in options.runs:
        rows = scored(run, options.iteration, options.under, options.dtype) if options.under else turns(run)
        low, high = interval(rows)
        print(f"{run.name}: {len(rows)} turns, p = {power(rows):.2f} (95 %: {low:.2f} to {high:.2f})")
        for number, n, deviation in groups(rows):
            times = f"times sqrt(n) {deviation * n**0.5:.3f}, times n {deviation * n:.3f}"
            print(f"  {n:5.1f} tokens: {number:5.0f} turns, deviation {deviation:.4f}, {times}")


if __name__ == "__main__":
    main()
