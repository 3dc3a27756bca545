"""Grid files, the outcome of a run, and the table of results."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.evidence.compare import contrasts
from megatron_stppo.evidence.compare.contrasts import Result
from megatron_stppo.evidence.compare.grid import Cell, Grid, Outcome, load

TEXT = """
config: config.yaml
overrides: {run.iterations: 4, model.path: "models/{seed}"}
arms: {plain: , st_ppo: {algorithm.preset: st_ppo}}
seeds: [0, 1]
contrasts:
  - {family: f, pairs: [[st_ppo, plain]]}
"""


def write(folder: Path, text: str = TEXT) -> Path:
    (folder / "config.yaml").write_text("run: {name: x}\n")
    path = folder / "grid.yaml"
    path.write_text(text)
    return path


def test_a_cell_has_the_overrides_of_grid_setting_and_arm_and_its_seed(tmp_path: Path) -> None:
    grid = load(write(tmp_path))
    assert [cell.name for cell in grid.cells()] == [
        "base-plain-0", "base-st_ppo-0", "base-plain-1", "base-st_ppo-1"
    ]  # fmt: skip
    assert grid.fields(Cell("st_ppo", "base", 1)) == [
        "run.seed=1", "run.iterations=4", "model.path=models/1", "algorithm.preset=st_ppo"
    ]  # fmt: skip
    assert grid.folder == tmp_path / "runs" / "grid"


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("config.yaml", "none.yaml", "config={}/none.yaml: no such file"),
        ("seeds: [0, 1]", "seeds: [1, 1]", "seeds=[1, 1]: holds a seed twice"),
        ("seeds: [0, 1]", "seed: [0, 1]", "seed: no such field; did you mean seeds?"),
        ("run.iterations: 4", "run.name: x", "run.name: compare sets it for each run"),
        ("[st_ppo, plain]", "[st_pp, plain]", "st_pp: no such arm; did you mean st_ppo?"),
        ("[st_ppo, plain]", "[st_ppo@basis, plain]", "basis: no such setting; did you mean base?"),
        ("st_ppo: {alg", "st/ppo: {alg", "arms.st/ppo"),
    ],
)
def test_a_wrong_grid_gets_one_line_with_field_and_remedy(
    tmp_path: Path, old: str, new: str, part: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(write(tmp_path, TEXT.replace(old, new, 1)))
    assert part.format(tmp_path) in str(raised.value)


def test_outcomes_are_the_last_or_the_mean_of_declared_iterations() -> None:
    recorded = {0: 0.5, 2: 0.1, 4: 0.9, 6: 0.4}
    assert Outcome(at="last").of(recorded) == 0.4
    assert Outcome(at="mean", first=2, last=6).of(recorded) == pytest.approx((0.1 + 0.9 + 0.4) / 3)
    with pytest.raises(ValueError, match="no value from iteration 8 on"):
        Outcome(at="last", first=8).of(recorded)


def test_what_a_run_that_ended_early_lacks_counts_as_missing() -> None:
    recorded = {i: 0.5 for i in range(0, 77, 2)}
    ended = Outcome(at="mean", first=52, last=100)
    assert ended.of(recorded) == pytest.approx(0.5 * 13 / 25)
    assert ended.of({i: 0.5 for i in range(0, 11, 2)}) == 0
    assert ended.of({i: 0.5 for i in range(0, 101, 2) if i != 60}) == 0.5, "a gap is left out"


def test_results_are_read_as_they_were_added_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    one = Result("a", "x", 0, 0.25, "a CPU, with AVX-512", 4, 12.5, digest="d")
    other = Result("a", "x", 1, 0.5, "a CPU, with AVX-512")
    for result in (one, other):
        contrasts.add(tmp_path, result)
    assert contrasts.read(tmp_path) == {one.cell: one, other.cell: other}
    contrasts.add(tmp_path, one)
    with pytest.raises(ConfigError, match="line 4: x-a-0 is there twice"):
        contrasts.read(tmp_path)
    (tmp_path / contrasts.FILE).write_text("arm,setting,seed,outcome,device\na,x,zero,0.5,c\n")
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        contrasts.read(tmp_path)


def test_results_of_other_overrides_or_another_device_are_not_continued(tmp_path: Path) -> None:
    grid = load(write(tmp_path))
    cell = Cell("plain", "base", 0)
    done = Result(*("plain", "base", 0), 0.5, "this", digest=grid.digest(cell))
    contrasts.check(grid, {cell: done}, "this")
    with pytest.raises(ConfigError, match="ran on this, and this machine has that"):
        contrasts.check(grid, {cell: done}, "that")
    changed: Grid = grid.model_copy(update={"overrides": {"run.iterations": 5}})
    with pytest.raises(ConfigError, match="base-plain-0 was run with other overrides"):
        contrasts.check(changed, {cell: done}, "this")
