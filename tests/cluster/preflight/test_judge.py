"""Every row passes on equal healthy nodes, and names the rank or node that differs."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron_stppo.cluster.preflight import limits
from megatron_stppo.cluster.preflight.check import show
from megatron_stppo.cluster.preflight.judge import NO_GPU, CheckRow, judge, slow_nodes
from megatron_stppo.cluster.preflight.records import Bandwidth, Facts, FolderSpeed, GpuFacts, Together
from megatron_stppo.config import ConfigError

NODES = ("a", "a", "b", "b")  # of ranks 0 to 3


def gpu(rank: int) -> GpuFacts:
    state = {
        "driver": "580.1",
        "memory_used": 0.7,
        "clock": 0.9,
        "uncorrected_errors": 0,
    }
    return GpuFacts("H100", f"GPU-{rank}", "sm_90", True, **state)  # type: ignore[arg-type]


def facts(rank: int) -> Facts:
    return Facts(
        rank,
        NODES[rank],
        versions={"torch": "2.13.0", "NCCL": "2.29.7"},
        gpu=gpu(rank),
        compute=650.0,
        open_files=65536,
        shared_memory=500.0,
        folder=None if rank % 2 else FolderSpeed(2.0, 4.0, 10_000.0),
    )


def together(rank: int) -> Together:
    node, pair = Bandwidth((NODES[rank],), 400.0), Bandwidth(("a", "b"), 80.0)
    clock = (100.0 + rank * 1e-3, 101.0, 102.0)
    return Together(rank, None if rank % 2 else 0.1, (), clock, (node, pair))


def rows(
    change: Callable[[Facts], Facts] = lambda x: x,
    meeting: Callable[[Together], Together] = lambda x: x,
    rank: int = 3,
    **overrides: float,
) -> dict[str, CheckRow]:
    """Return {name: row} of four healthy ranks, of which one's records are changed."""
    alone = {r: change(facts(r)) if r == rank else facts(r) for r in range(4)}
    met = {r: meeting(together(r)) if r == rank else together(r) for r in range(4)}
    return {row.name: row for row in judge(4, alone, met, limits.DEFAULTS | overrides)}


def of_gpu(**changes: object) -> Callable[[Facts], Facts]:
    return lambda f: replace(f, gpu=replace(f.gpu or gpu(f.rank), **changes))  # type: ignore[arg-type]


def failures(found: dict[str, CheckRow]) -> dict[str, tuple[str, ...]]:
    return {row.name: row.who for row in found.values() if row.verdict == "fail"}


def test_equal_healthy_nodes_pass_and_unsupported_numbers_are_not_checked() -> None:
    alone = {rank: of_gpu(clock=None)(facts(rank)) for rank in range(4)}
    judged = judge(4, alone, {rank: together(rank) for rank in range(4)}, limits.DEFAULTS)
    found = {row.name: row for row in judged}
    assert failures(found) == {}
    unchecked = {row.name for row in found.values() if row.verdict == "not checked"}
    assert unchecked == {"SM clock under load", "all-reduce of all nodes"}, "two nodes are a pair"
    assert found["all-reduce of two nodes"].value == "80 GB/s"


@pytest.mark.parametrize(
    ("change", "row", "who"),
    [
        (
            lambda f: replace(f, versions=f.versions | {"NCCL": "2.28.0"}),
            "version of NCCL",
            "rank 3 (b): 2.28.0",
        ),
        (lambda f: replace(f, versions={"torch": "2.13.0"}), "version of NCCL", "rank 3 (b): missing"),
        (of_gpu(driver="570.0"), "version of the driver", "rank 3 (b): 570.0"),
        (of_gpu(name="A100"), "model of the GPUs", "rank 3 (b): A100"),
        (of_gpu(uuid="GPU-2"), "every GPU used once", "rank 2 (b) and rank 3 (b): GPU-2"),
        (of_gpu(has_kernels=False), "kernels of csrc/", "rank 3 (b): not built for sm_90"),
        (of_gpu(throttled=("power brake",)), "throttling", "rank 3 (b): power brake"),
        (of_gpu(remapped_rows="pending"), "remapped memory rows", "rank 3 (b): pending"),
        (of_gpu(clock=0.5), "SM clock under load", "rank 3 (b): 0.5 x maximum"),
        (of_gpu(memory_used=70.0), "GPU memory in use", "rank 3 (b): 70 GiB"),
        (of_gpu(uncorrected_errors=2), "uncorrected memory errors", "rank 3 (b): 2 errors"),
        (lambda f: replace(f, gpu=None), "a GPU for every rank", "rank 3 (b): sees no GPU"),
        (lambda f: replace(f, compute=500.0), "matrix product", "rank 3 (b): 0.769 x median"),
        (lambda f: replace(f, open_files=1024), "limit on open files", "rank 3 (b): 1024 files"),
        (lambda f: replace(f, shared_memory=0.0625), "size of /dev/shm", "rank 3 (b): 0.0625 GiB"),
        (lambda f: replace(f, errors={"GPU": "lost"}), "ranks answer", "rank 3 (b): GPU: lost"),
        (lambda f: replace(f, folder=FolderSpeed(0.1, 4, 999)), "write to the run folder", "b: 0.1 GB/s"),
        (lambda f: replace(f, folder=FolderSpeed(2, 0.1, 999)), "read from the run folder", "b: 0.1 GB/s"),
        (lambda f: replace(f, folder=FolderSpeed(2, 4, 100)), "free space in the run folder", "b: 100 GB"),
    ],
)
def test_a_rank_that_differs_is_the_only_failure_and_is_named(
    change: Callable[[Facts], Facts], row: str, who: str
) -> None:
    found = rows(change)
    assert failures(found) == {row: (who,)}
    assert found[row].remedy


@pytest.mark.parametrize(
    ("meeting", "row", "who"),
    [
        (lambda t: replace(t, clock=(103.5, 104.5, 105.5)), "clocks of the nodes", "b: 3.5 s"),
        (
            lambda t: replace(t, visible=10.1, hidden=("a",)),
            "run folder is shared",
            "b: does not see the file of a",
        ),
        (lambda t: replace(t, errors={"network": "late"}), "ranks answer", "rank 3 (b): network: late"),
        (
            lambda t: replace(t, bandwidth=(Bandwidth(("b",), 20.0),)),
            "all-reduce within a node",
            "b: 20 GB/s",
        ),
        (
            lambda t: replace(t, bandwidth=(Bandwidth(("a", "b"), 3.0),)),
            "all-reduce of two nodes",
            "a + b: 3 GB/s",
        ),
    ],
)
def test_a_node_that_differs_in_a_common_measurement_is_named(
    meeting: Callable[[Together], Together], row: str, who: str
) -> None:
    assert failures(rows(meeting=meeting)) == {row: (who,)}


def test_ranks_that_do_not_answer_are_named_and_what_they_measured_is_not_judged() -> None:
    found = {row.name: row for row in judge(4, {0: facts(0), 1: facts(1)}, {}, limits.DEFAULTS)}
    assert failures(found) == {
        "ranks answer": ("rank 2: did not start, or hangs", "rank 3: did not start, or hangs")
    }
    assert found["clocks of the nodes"].verdict == "not checked"
    met = {rank: together(rank) for rank in range(3)}
    found = {row.name: row for row in judge(4, {r: facts(r) for r in range(4)}, met, limits.DEFAULTS)}
    assert failures(found) == {"ranks answer": ("rank 3 (b): stopped answering",)}


def test_without_a_gpu_rows_about_gpus_do_not_pass_unless_slurm_gave_some() -> None:
    alone = {rank: replace(facts(rank), gpu=None) for rank in range(4)}
    met = {rank: together(rank) for rank in range(4)}
    found = {row.name: row for row in judge(4, alone, met, limits.DEFAULTS)}
    assert failures(found) == {}
    of_gpus = [row for row in found.values() if row.verdict == "not checked" and row.remedy == NO_GPU]
    assert {"a GPU for every rank", "matrix product", "all-reduce within a node"} < {
        row.name for row in of_gpus
    }
    assert found["all-reduce within a node"].value == "400 GB/s", "shown, but not judged"
    alone[2] = replace(alone[2], expects_gpu=True)
    found = {row.name: row for row in judge(4, alone, met, limits.DEFAULTS)}
    assert failures(found) == {"a GPU for every rank": ("rank 2 (b): sees no GPU",)}


def test_a_node_that_is_slow_with_both_neighbours_is_the_suspect() -> None:
    pairs = {("a", "b"): 5.0, ("b", "c"): 6.0, ("a", "c"): 90.0}
    assert slow_nodes(pairs, 40.0) == ["b"]
    assert slow_nodes({("a", "b"): 5.0}, 40.0) == [], "one pair does not tell which"


def test_limits_can_be_changed_and_open_files_grow_with_the_ranks() -> None:
    assert failures(rows(max_memory_used=0.5)).keys() == {"GPU memory in use"}
    given = limits.read(["min_bandwidth_node=300", "max_skew=2.5"])
    assert (given["min_bandwidth_node"], given["max_skew"], given["min_clock"]) == (300.0, 2.5, 0.6)
    many = {row.name: row for row in judge(10_000, {0: facts(0)}, {}, limits.DEFAULTS)}
    assert many["limit on open files"].limit == "at least 41024 files"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("min_bandwith_node=1", "no such limit; did you mean min_bandwidth_node?"),
        ("x", "choose one of min_bandwidth_node, "),
        ("max_skew=fast", "is not a number; write max_skew=1"),
        ("max_skew=nan", "is not a number"),
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
    for limit in limits.LIMITS:
        assert f"| `{limit.name}` | {limit.default:g} {limit.unit} | {limit.reason} |" in text
