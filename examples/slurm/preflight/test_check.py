"""The whole cluster check on real gloo: two ranks on each of two nodes, which are one machine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from examples.slurm.preflight import limits
from examples.slurm.preflight.check import Settings, check
from examples.slurm.preflight.judge import ANSWERS
from megatron_stppo.cluster.launch.process import free_port
from tests.ranks import run_ranks

EASY = (
    "min_free_space=0",
    "min_open_files=0",
    "min_write=0",
    "min_read=0",
    "min_shared_memory=0",
    "max_visible=2",
)
PAIR, RING = ("a", "a", "b", "b"), ("a", "b", "c")  # the node of every rank


@dataclass(frozen=True)
class Result:
    codes: list[int]
    printed: list[str]
    written: dict[str, Any]

    @property
    def rows(self) -> dict[str, Any]:
        return {row["name"]: row for row in self.written["rows"]}

    @property
    def failures(self) -> dict[str, list[str]]:
        return {row["name"]: row["who"] for row in self.rows.values() if row["verdict"] == "fail"}


def of_rank(
    port: str,
    root: str,
    nodes: tuple[str, ...],
    seconds: float,
    folder_of_b: str,
    absent: int,
    interface: str,
) -> tuple[int, str]:
    """Return (exit code, printed text) of this rank; (-1, "") for the rank that is `absent`."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == absent:
        return -1, ""
    local, here = nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])
    os.environ.update(MASTER_PORT=port, LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(here))
    os.environ.update(SLURMD_NODENAME=nodes[rank], GLOO_SOCKET_IFNAME=interface if rank == 3 else "lo")
    folder = Path(root, folder_of_b if nodes[rank] == "b" else "runs")
    settings = Settings(folder, limits.read(EASY), seconds, 2**20, Path(root, "check.json"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = check(settings)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code, printed.getvalue()


def job(
    root: Path,
    nodes: tuple[str, ...] = PAIR,
    seconds: float = 60,
    folder_of_b: str = "runs",
    absent: int = -1,
    interface: str = "lo",
) -> Result:
    ends = run_ranks(
        of_rank, len(nodes), free_port(), str(root), nodes, seconds, folder_of_b, absent, interface
    )
    codes, printed = zip(*ends, strict=True)
    return Result(list(codes), list(printed), json.loads((root / "check.json").read_text()))


def groups(report: dict[str, Any]) -> set[str]:
    """Return the groups of nodes whose bandwidth a rank has measured."""
    return {who for name, who, _ in report["numbers"] if name.startswith("min_bandwidth")}


def test_healthy_ranks_pass_with_a_number_for_every_bandwidth_and_leave_no_file(tmp_path: Path) -> None:
    found = job(tmp_path)
    assert (found.codes, found.failures) == ([0] * 4, {})
    assert found.rows[ANSWERS]["value"] == "4"
    for name in ("all-reduce within a node", "all-reduce of two nodes"):
        row = found.rows[name]
        assert float(row["value"].removesuffix(" GB/s")) > 0
        assert (row["verdict"], row["remedy"]) == ("not checked", "no GPU: not checked")
    for name in ("run folder is shared", "version of torch"):
        assert found.rows[name]["verdict"] == "pass"
    assert not list((tmp_path / "runs").iterdir())
    assert found.printed[0].startswith("preflight") and found.printed[1:] == [""] * 3
    assert found.written["passed"] and list(found.written["ranks"]) == ["0", "1", "2", "3"]
    assert groups(found.written["ranks"]["3"]) == {"b", "a + b"}


def test_of_three_nodes_every_pair_and_all_together_are_measured(tmp_path: Path) -> None:
    found = job(tmp_path, RING)
    assert (found.codes, found.failures) == ([0] * 3, {})
    measured = [groups(report) for report in found.written["ranks"].values()]
    assert set.union(*measured) == {"a + b", "b + c", "a + c", "all"}
    assert float(found.rows["all-reduce of all nodes"]["value"].removesuffix(" GB/s")) > 0


def test_a_node_whose_run_folder_is_not_shared_is_named(tmp_path: Path) -> None:
    found = job(tmp_path, folder_of_b="own")
    assert found.codes == [2] * 4
    assert list(found.failures) == [ANSWERS, "run folder is shared"]
    assert found.failures[ANSWERS] == [
        "rank 0 (a): files of other nodes: does not see the file of b",
        "rank 2 (b): files of other nodes: does not see the file of a",
    ]


def test_a_node_that_cannot_write_the_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = job(tmp_path, folder_of_b="file/runs")
    assert found.codes == [2] * 4
    seen, error = found.failures[ANSWERS]
    assert seen == "rank 0 (a): files of other nodes: does not see the file of b"
    assert error.startswith("rank 2 (b): run folder: NotADirectoryError: ")


def test_a_rank_that_does_not_start_is_named_and_the_others_end(tmp_path: Path) -> None:
    found = job(tmp_path, seconds=10, absent=3)
    assert found.codes == [2, 2, 2, -1]
    assert found.failures == {ANSWERS: ["rank 3: did not start, or hangs"]}


@pytest.mark.long
def test_a_rank_that_cannot_join_the_network_is_named_and_the_others_end(tmp_path: Path) -> None:
    found = job(tmp_path, seconds=10, interface="no-such0")
    assert found.codes == [2] * 4
    errors = found.failures[ANSWERS]
    assert errors[3].startswith("rank 3 (b): network: ")
    assert "no-such0" in errors[3]


def test_a_wrong_limit_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "examples.slurm.preflight", "--limit", "min_compte=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "did you mean min_compute?" in done.stderr
