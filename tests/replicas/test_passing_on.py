"""Weights that replicas pass on: every replica gets every version, whichever of them is killed in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankError
from tests.replicas import light
from tests.replicas.light import Dies
from tests.replicas.two_programs import run_programs

VOCABULARY = 150_000  # 38 MB in float32: three buckets


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("light")
    light.write_project(folder, VOCABULARY)
    return folder


def copy(project: Path, folder: Path) -> Path:
    for name in ("model", "tasks.jsonl"):
        (folder / name).symlink_to(project / name)
    return folder


@pytest.mark.usefixtures("one_order")
def test_every_replica_gets_every_version_and_the_trainer_sends_each_row_once(
    project: Path, tmp_path: Path
) -> None:
    """A trainer of two ranks; one of the replicas has two ranks, so that weights are cut anew."""
    folder = copy(project, tmp_path)
    programs = {
        "trainer": (light.train, 2, (folder, 4, 3)),
        **{f"r{n}": (light.serve, 1, (folder, f"r{n}")) for n in range(3)},
        "r3": (light.serve, 2, (folder, "r3")),
    }
    ended = run_programs(programs)
    rows = ended["trainer"].result()[0]
    size = (folder / "model" / "model.safetensors").stat().st_size
    assert all(0.99 * size < row["sent"] < 1.01 * size and row["serve"] == 4 for row in rows)
    for name in ("r0", "r1", "r2", "r3"):
        for why, seen in ended[name].result():
            assert why == "stop: the run has ended"
            assert seen[:4] == [(version, True) for version in range(4)]


@pytest.mark.parametrize("gives", [True, False], ids=["giver", "receiver"])
def test_a_replica_that_is_killed_in_the_middle_of_a_transfer_costs_only_its_own_update(
    project: Path, tmp_path: Path, gives: bool
) -> None:
    folder = copy(project, tmp_path)
    programs = {
        "trainer": (light.train, 1, (folder, 3, 3)),
        **{f"r{n}": (light.serve, 1, (folder, f"r{n}", Dies(2, gives))) for n in range(3)},
    }
    ended = run_programs(programs)
    (rows,) = ended["trainer"].result()
    assert [row["lost"] for row in rows] == [0, 1, 1] and rows[-1]["serve"] == 2
    assert max(row["all"] for row in rows) < 15, "less than serving.timeout"
    survived = []
    for n in range(3):
        try:
            survived += ended[f"r{n}"].result()
        except RankError as error:
            assert "rank 0 died" in str(error)
    assert [(why, seen[:4]) for why, seen in survived] == [
        ("stop: the run has ended", [(version, True) for version in range(4)])
    ] * 2
