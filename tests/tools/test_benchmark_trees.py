"""tools/benchmark_trees.py: its rollouts and counts, its tables, and one case with a tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_stppo.base.types import Trajectory
from tools import benchmark_trees
from tools.trees import report
from tools.trees.report import counts, distinct
from tools.trees.rollouts import INSTRUCTION, RECORDED, _episode, _turn, renumbered, trajectories

ROOT = Path(__file__).parents[2]


def of(*texts: str) -> list[Trajectory]:
    """Return trajectories whose tokens are letters; the last one of each is its turn."""
    return [_episode(0, list(text[:-1].encode()), [_turn(list(text[-1:].encode()), ())]) for text in texts]


def test_distinct_tokens_are_the_nodes_of_the_trie() -> None:
    assert distinct(of("abcd", "abxy", "b")) == 4 + 2 + 1
    assert distinct(of("abcd", "abcd", "abc")) == 4


def test_the_share_of_the_saving_depends_on_what_fits_into_a_microbatch() -> None:
    five = "abcde"
    played = of(*(five + more for more in ("fghij", "klmno", "pqrst")))
    found = counts(played, [15, 20])
    assert (found["tokens"], found["distinct"], found["action tokens"]) == (30, 20, 3)
    assert found["computed"] == {"15": 25, "20": 20} and found["reached"] == {"15": 0.5, "20": 1.0}


def test_recorded_episodes_are_those_of_the_example() -> None:
    search, instructed = trajectories("search"), trajectories("instructed")
    assert RECORDED.stat().st_size <= 60 * 1024
    assert [sum(len(t.token_ids) for t in case) for case in (search, instructed)] == [5343, 5343 + 32 * 211]
    assert "search" in INSTRUCTION and all(max(t.token_ids) < 49_152 for t in search)  # SmolLM2's
    turns = [turn for t in search for turn in t.turns]
    assert sum(len(turn.token_ids) for turn in turns) == 796 and sum(t.reward for t in search) > 0
    assert [t.turns for t in search] == [t.turns for t in instructed]


def test_renumbered_tokens_are_few_and_have_the_same_trie() -> None:
    assert [t.token_ids for t in renumbered(of("xbz", "xbc"))] == [(2, 0, 3), (2, 0, 1)]
    played = trajectories("instructed")
    small = renumbered(played)
    assert max(max(t.token_ids) for t in small) < 4096 and distinct(small) == distinct(played)


def test_drawn_episodes_have_the_described_sizes() -> None:
    tools = trajectories("bfcl")
    assert len(tools) == 32 and {t.group for t in tools} == {0, 1, 2, 3}
    assert {3594 + 40 <= len(t.prompt_ids) <= 3594 + 80 for t in tools} == {True}
    assert 4356 < sum(len(t.token_ids) for t in tools) / 32 < 4556
    first, other, again = (tools[8 * n].prompt_ids for n in range(3))
    assert first[:394] == other[:394] and first[394:3594] != other[394:3594] and first[:3594] == again[:3594]
    starts = [t.turns[0].token_ids for t in tools[:8]]
    assert len({ids[:5] for ids in starts}) == 1 and len({ids[:6] for ids in starts}) == 8


def test_a_compacting_agent_has_five_histories_that_begin_with_its_task() -> None:
    histories = trajectories("compacting", tasks=1)
    assert [t.branch for t in histories] == [0, 1, 2, 3, 4] * 4
    first, second, _, _, again = histories[:5]
    assert all(t.prompt_ids[:1000] == first.prompt_ids for t in histories)
    assert second.prompt_ids[1000:] == first.turns[-1].token_ids  # the summary
    assert second.token_ids[: len(again.prompt_ids)] == again.prompt_ids


def test_the_tables_have_medians_spreads_and_ratios() -> None:
    record = {
        "machine": {"name": "CPU", "device": "cpu", "vectors": "avx2", "threads": 1, "cores": 2}
        | {"torch": "2", "load": 0, "date": "2026"},
        "model": "tiny",
        "timed": 20,
        "cases": {
            "search": {
                "counts": counts(of("abcde", "abcxy"), [20]),
                "off": [{"score": 2.0, "update": 4.0, "processor": 5.0}],
                "on": [{"score": 1.0, "update": x, "processor": 5.0} for x in (4.0, 2.0, 1.0)],
                "peak": {"off": 2**31, "on": 2**30},
            }
        },
    }
    lines = report.tables(record).splitlines()
    assert lines[4] == "| search | 2 | 10 | 2 | 7 | 1.43 | 7 (100%) |"
    spreads = "2.00 (2.00 to 2.00) | 4.00 (4.00 to 4.00) | 5.00 (5.00 to 5.00)"
    assert lines[-2] == f"| search | off | {spreads} | 2 | 2.00x | 2.00 |"
    spreads = "1.00 (1.00 to 1.00) | 2.00 (1.00 to 4.00) | 5.00 (5.00 to 5.00)"
    assert lines[-1] == f"| search | on | {spreads} | 3 | 1.00x | 1.00 |"


@pytest.mark.long
def test_the_first_case_runs_on_a_tiny_model(tmp_path: Path) -> None:
    line = [sys.executable, "tools/benchmark_trees.py", "--cases", "search", "--rounds", "1"]
    line += ["--threads", "1", "--timed", "2048", "--output", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "trees.json").read_text())
    found = record["cases"]["search"]
    assert found["counts"]["distinct"] == 4625 and found["counts"]["computed"]["16384"] == 4625
    assert found["check"]["largest difference"] <= 1e-4 and found["check"]["first ratios are 1"]
    assert [sorted(found[arm][0]) for arm in ("off", "on")] == [["processor", "score", "update"]] * 2
    assert min(found["peak"].values()) > 2**28
    assert done.stdout.strip() == report.tables(record)


def test_a_process_that_fails_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--cases", "search", "--model", str(tmp_path / "none"), "--output", str(tmp_path)]
    assert benchmark_trees.main([*wrong, "--rounds", "1"]) == 1
    assert "benchmark_trees: exit status 1: " in capsys.readouterr().err
    assert benchmark_trees.main([*wrong, "--rounds", "0"]) == 0


def test_trl_gets_the_tokens_and_a_mask_of_the_action_tokens(tmp_path: Path) -> None:
    given = benchmark_trees.parse(["--cases", "search", "--trl", "8"])
    case = benchmark_trees.Case(given, "search", tmp_path)
    case._played = [replace(one, group=n) for n, one in enumerate(of("abc", "abd"))]
    made = case._for_trl(8)
    assert made["episodes"] == [[(97, 98), [99], [1]], [(97, 98), [100], [1]]] and made["samples"] == 1
    text = (ROOT / "tools/peers/trl_side.py").read_text()
    assert set(made) == set(re.findall(r'given\["(\w+)"\]', text))
