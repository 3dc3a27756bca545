from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stppo.config import ParallelConfig
from megatron_stppo.evidence.layouts.cases import OTHERS, few
from megatron_stppo.parallel.layout import Layout
from tests.evidence.checks import bench
from tests.ranks import run_ranks
from tests.weights.reshard.pieces import model_shape

BUGS = (
    "critic_mean_of_microbatch",
    "actor_mean_of_microbatch",
    "divided_by_microbatches",
    "doubled_buffer",
)


def test_the_other_layouts_are_those_without_data_parallelism_and_with_most_of_it():
    given = ParallelConfig(tensor=2)
    found = few(model_shape(layers=4), 4, given, [64, 1, 1000])
    assert [case.parallel == given for case in found] == [True] * 5 + [False] * OTHERS
    data = [Layout.of_world(4, case.parallel).data for case in found[5:]]
    assert data[0] == 1 and data[1] == 4


def test_the_step_is_the_same_and_every_planted_bug_is_found(tmp_path: Path) -> None:
    model = bench.write(tmp_path / "m")
    (found,) = run_ranks(bench.examine, 1, "layouts", model, ("", *BUGS), {})
    assert bench.verdicts(found) == {"": ["ok"]} | {name: ["fails"] for name in BUGS}, found


@pytest.mark.long
def test_an_average_over_data_parallel_ranks_is_found(tmp_path: Path) -> None:
    model, names = bench.write(tmp_path / "m"), ("", "averaged")
    found, other = run_ranks(bench.examine, 2, "layouts", model, names, {})
    assert found == other
    assert bench.verdicts(found) == {"": ["ok"], "averaged": ["fails"]}, found
