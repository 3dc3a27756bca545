"""Run folders for tests of the page: one as training writes it, and one made by an attacker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARKUP = "</script><script>window.struck = 1</script><img src=x onerror='window.struck = 2'>"
CODES = "left\u202eright \x1b[2J \u2028 \ud800 zero\u200bwidth"
CONFIG = "run: {name: %s}\nalgorithm: {preset: %s, clip_low: 0.2, clip_high: 0.28}\n"


def turn(action: str, observation: str = "") -> dict[str, Any]:
    return {
        "action": action,
        "observation": observation,
        "reward": 0.0,
        "versions": [[1, 1]],
        "token_ids": [1],
    }


def episode(outcome: str, reward: float, *turns: dict[str, Any], **changes: Any) -> dict[str, Any]:
    prompt = "<|im_start|>user\nWhich city?<|im_end|>\n<|im_start|>assistant\n"
    return {
        "iteration": 1, "data_source": "test", "split": "train", "index": 3, "group": 0, "outcome": outcome,
        "reward": reward, "tool_calls": 1, "valid_actions": 1, "detail": "", "targets": ["Paris"],
        "prompt": prompt, "turns": list(turns),
    } | changes  # fmt: skip


def told(**changes: float | None) -> dict[str, float | None]:
    return {"tokens": 5, "advantage": 1.0, "ratio": 1.0, "clipped": 0.0, "mismatch": 1.0} | changes


def lines(*records: Any) -> str:
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


def write(folder: Path, preset: str = "st_ppo", iterations: int = 4) -> Path:
    """Write a run of three episodes in its first iteration and one in its second, not updated yet."""
    played = folder / "trajectories"
    played.mkdir(parents=True)
    rows = [
        {
            "iteration": k,
            "reward/mean": k / 4,
            "actor/clip_fraction": 0.1 * k,
            "actor/gradient_norm": 10.0**k,
            "seconds/rollout": 1.0,
            "seconds/update": 3.0,
            "seconds": 4.0,
            "environment/score": k / 8,
        }
        for k in range(1, iterations + 1)
    ]
    (folder / "metrics.jsonl").write_text(lines(*rows))
    (folder / "config.yaml").write_text(CONFIG % (json.dumps(folder.name), preset))
    first = [
        episode("ok", 1.0, turn("<search>city</search>", "Paris is a city."), turn("<answer>Paris</answer>")),
        episode("wrong", 0.0, turn(MARKUP, CODES), detail=CODES, metrics={MARKUP: 1, "score": 0.5, "x": "1"}),
        episode("truncated", 0.5, turn("x" * 2**20)),
    ]
    (played / "iteration-00001.jsonl").write_text(lines(*first))
    tellings = [
        {"turns": [told(), told(ratio=1.5, clipped=5.0, advantage=2.0)]},
        {"turns": [told(ratio=0.9, advantage=-1.0)]},
        {"turns": [told(ratio=None, advantage=None, clipped=None, action=1.0, version=7.0)]},
    ]
    (played / "iteration-00001.turns.jsonl").write_text(lines(*tellings))
    (played / "iteration-00002.jsonl").write_text(
        lines(episode("ok", 1.0, turn("<answer>Rome</answer>"), index=1))
    )
    return folder


def damage(folder: Path) -> None:
    """Append invalid and hostile lines to every file."""
    bad = ["{", "[]", "[" * 100_000, '{"iteration": "x"}', '{"iteration": true}', '{"iteration": -1}']
    odd = [f'{{"iteration": 5, "reward/mean": NaN, "x": "{MARKUP[:9]}", "y": 1{"0" * 400}, "z": true}}']
    odd.append('{"iteration": 6, "constructor": 1, "__proto__": 2, "toString": 3}')
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(lines(*bad, *odd).encode() + b'\xff\n{"iteration": 7, "reward')
    with (folder / "trajectories" / "iteration-00001.jsonl").open("ab") as file:
        file.write(lines("{", {"turns": 3}, {"turns": [{"action": 5}]}, {}).encode() + b"\xff\xfe\n")
    with (folder / "trajectories" / "iteration-00001.turns.jsonl").open("a") as file:
        file.write(lines({"turns": [{"ratio": "high"}]}))
    for name in ("1", "\u0661"):  # another spelling of the first iteration's number
        (folder / "trajectories" / f"iteration-{name}.jsonl").touch()
    (folder / "config.yaml").write_text("a: &a [1, 2]\nb: [*a, *a]\n")
    (folder / "summary.json").write_text("{")
