"""Every row passes on equal healthy nodes, and names the rank or node that differs."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from examples.slurm.preflight import limits
from examples.slurm.preflight.check import show
from examples.slurm.preflight.exchange import RankReport
from examples.slurm.preflight.judge import ANSWERS, CheckRow, judge, worst_of
from megatron_stppo.config import ConfigError

NODES = ("a", "a", "b", "b")  # of ranks 0 to 3
HEALTHY = {
    "min_bandwidth_node": 400.0,
    "min_all_to_all_node": 300.0,
    "min_compute": 650.0,
    "max_memory_used": 0.7,
    "max_uncorrected_errors": 0,
    "min_write": 2.0,
    "min_read": 4.0,
    "min_free_space": 10_000.0,
    "max_visible": 0.1,
    "min_open_files": 65536,
    "min_shared_memory": 500.0,
}
OF_A_NODE = (
    "min_bandwidth_node",
    "min_all_to_all_node",
    "min_write",
    "min_read",
    "min_free_space",
    "max_visible",
)


def report(
    rank: int, numbers: dict[str, float] | None = None, pair: float = 300.0, swap: float = 300.0
) -> RankReport:
    node, given = NODES[rank], HEALTHY | (numbers or {})
    listed = [
        (name, node if name in OF_A_NODE else f"rank {rank} ({node})", value) for name, value in given.items()
    ]
    texts = {"version of NCCL": "2.29.7", "model of the GPUs": "H100"}
    pairs = [("min_bandwidth_pair", "a + b", pair), ("min_all_to_all_pair", "a + b", swap)]
    return RankReport(node, [*listed, *pairs], texts)


def rows(last: RankReport, **overrides: float) -> dict[str, CheckRow]:
    """Return {name: row} of four ranks, of which the last one has the report `last`."""
    alone = {0: report(0), 1: report(1), 2: report(2), 3: last}
    return {row.name: row for row in judge(4, alone, alone, limits.DEFAULTS | overrides)}


def failures(found: dict[str, CheckRow]) -> dict[str, tuple[str, ...]]:
    return {row.name: row.who for row in found.values() if row.verdict == "fail"}


def test_equal_healthy_nodes_pass_and_numbers_that_are_not_measured_are_not_checked() -> None:
    found = rows(report(3))
    assert failures(found) == {}
    assert [row.name for row in found.values() if row.verdict == "not checked"] == [
        "all-reduce of all nodes",
        "all-to-all of all nodes",
    ], "two nodes are a pair"
    assert found["all-reduce of two nodes"].value == "300 GB/s"
    assert len(found) == 3 + len(limits.LIMITS)


@pytest.mark.parametrize(
    ("limit", "value", "row", "who"),
    [
        ("max_memory_used", 70.0, "GPU memory in use", "rank 3 (b): 70 GiB"),
        ("max_uncorrected_errors", 2, "uncorrected memory errors", "rank 3 (b): 2 errors"),
        ("min_compute", 500.0, "matrix product", "rank 3 (b): 0.769 x median"),
        ("min_open_files", 1024, "limit on open files", "rank 3 (b): 1024 files"),
        ("min_shared_memory", 0.0625, "size of /dev/shm", "rank 3 (b): 0.0625 GiB"),
        ("min_write", 0.1, "write to the run folder", "b: 0.1 GB/s"),
        ("min_read", 0.1, "read from the run folder", "b: 0.1 GB/s"),
        ("min_free_space", 100, "free space in the run folder", "b: 100 GB"),
        ("max_visible", 10.5, "run folder is shared", "b: 10.5 s"),
        ("min_bandwidth_node", 20.0, "all-reduce within a node", "b: 20 GB/s"),
        ("min_all_to_all_node", 90.0, "all-to-all within a node", "b: 90 GB/s"),
    ],
)
def test_a_rank_beyond_a_limit_is_the_only_failure_and_is_named(
    limit: str, value: float, row: str, who: str
) -> None:
    found = rows(report(3, {limit: value}))
    assert failures(found) == {row: (who,)}
    assert found[row].remedy


def test_the_bandwidth_of_a_pair_is_that_of_its_slowest_rank() -> None:
    assert failures(rows(report(3, pair=3.0))) == {"all-reduce of two nodes": ("a + b: 3 GB/s",)}
    assert worst_of("max_visible", [("max_visible", "a", 1.0), ("max_visible", "a", 2.0)]) == {"a": 2.0}


HOPPER, ADAPTERS = ("generation", "rank 3 (b)", 9), ("GB/s of the adapters", "a", 400.0)


@pytest.mark.parametrize(
    ("measured", "pair", "fails"),
    [
        ([HOPPER], 260.0, False),
        ([HOPPER], 48.0, True),
        ([HOPPER, ADAPTERS, ("GB/s of the adapters", "b", 50.0)], 330.0, False),
        ([ADAPTERS], 48.0, True),
        ([HOPPER, ("GB/s of the adapters", "a", 60.0)], 48.0, False),
    ],
)
def test_a_pair_that_uses_one_of_eight_adapters_fails(
    measured: list[tuple[str, str, float]], pair: float, fails: bool
) -> None:
    last = report(3, pair=pair, swap=pair)
    last.numbers += measured
    rows_that_fail = {"all-reduce of two nodes", "all-to-all of two nodes"}
    assert failures(rows(last)).keys() == (rows_that_fail if fails else set())


@pytest.mark.parametrize(
    ("change", "row", "who"),
    [
        (lambda r: r.texts.update({"version of NCCL": "2.28.0"}), "version of NCCL", "2.28.0"),
        (lambda r: r.texts.pop("model of the GPUs"), "model of the GPUs", "missing"),
        (lambda r: r.faults.update(GPU="lost", network="late"), ANSWERS, "GPU: lost; network: late"),
    ],
)
def test_a_rank_with_another_version_without_a_gpu_or_with_a_fault_is_named(
    change: Callable[[RankReport], object], row: str, who: str
) -> None:
    last = report(3)
    change(last)
    found = rows(last)
    assert failures(found) == {row: (f"rank 3 (b): {who}",)}
    assert found[row].remedy


def test_ranks_that_do_not_answer_are_named_and_the_others_are_judged() -> None:
    found = {row.name: row for row in judge(4, {0: report(0), 1: report(1)}, {}, limits.DEFAULTS)}
    assert failures(found) == {
        ANSWERS: ("rank 2: did not start, or hangs", "rank 3: did not start, or hangs")
    }
    alone = {rank: report(rank) for rank in range(4)}
    together = {rank: report(rank) for rank in range(3)}
    found = {row.name: row for row in judge(4, alone, together, limits.DEFAULTS)}
    assert failures(found) == {ANSWERS: ("rank 3 (b): stopped answering",)}


def test_limits_can_be_changed_and_open_files_grow_with_the_ranks() -> None:
    assert failures(rows(report(3), max_memory_used=0.5)).keys() == {"GPU memory in use"}
    assert limits.derived([HOPPER])["min_bandwidth_node"] == 320
    given = limits.read(["min_bandwidth_node=300", "max_visible=2.5"])
    assert (given["min_bandwidth_node"], given["max_visible"], given["min_compute"]) == (300.0, 2.5, 0.9)
    many = {row.name: row for row in judge(10_000, {0: report(0)}, {}, limits.DEFAULTS)}
    assert many["limit on open files"].limit == "at least 41024 files"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("min_bandwith_node=1", "no such limit; did you mean min_bandwidth_node?"),
        ("x", "choose one of min_bandwidth_node, "),
        ("max_visible=fast", "is not a number; write max_visible=10"),
        ("max_visible=nan", "is not a number"),
    ],
)
def test_a_wrong_limit_is_refused_with_a_remedy(override: str, part: str) -> None:
    with pytest.raises(ConfigError, match=f"--limit {override}: ") as raised:
        limits.read([override])
    assert part in str(raised.value)


def test_the_table_shows_some_failing_ranks() -> None:
    who = tuple(f"rank {rank}" for rank in range(10))
    made = [
        CheckRow("a", "1", "2", "fail", who, "do this"),
        CheckRow("b [x]", "1", "1", "pass"),
        CheckRow("c", "", "", "not checked"),
    ]
    text = io.StringIO()
    show(made, Console(file=text, width=120))
    lines = text.getvalue()
    assert "rank 3" in lines and "rank 4" not in lines and "and 6 more" in lines and "do this" in lines
    assert "b [x]" in lines and lines.endswith("1 pass, 1 fail, 1 not checked\n")


def test_the_documentation_has_every_limit_with_its_default_and_reason() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()
    for limit in (limit for limit in limits.LIMITS if limit.name not in limits.SWAPS.values()):
        default = limit.default if isinstance(limit.default, str) else f"{limit.default:g} {limit.unit}"
        assert f"| `{limit.name}` | {default} | {limit.reason} |" in text
    (swap,) = {
        (limit.default, limit.reason) for limit in limits.LIMITS if limit.name in limits.SWAPS.values()
    }
    assert f"| `min_all_to_all_node`, `_pair`, `_all` | {swap[0]} | {swap[1]} |" in text
