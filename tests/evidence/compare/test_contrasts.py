"""Contrasts of results that are written down here, and those of docs/study."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from megatron_stppo.config import file
from megatron_stppo.evidence.compare import results
from megatron_stppo.evidence.compare.contrasts import (
    Contrast,
    contrasts,
    holm,
    mean_interval,
    paired_p,
    quantile,
    student,
    text,
    write,
)
from megatron_stppo.evidence.compare.grid import Cell, Grid, load
from megatron_stppo.evidence.compare.results import Result

STUDY = Path(__file__).parents[3] / "docs" / "study"
# The differences and adjusted p values that were published before `compare` existed.
PUBLISHED = {
    "search": {
        "s_ppo - ppo, five rates": (0.251, 0.086, 0.004),
        "st_ppo - turn_ppo, five rates": (0.273, 0.049, 0.001),
        "s_ppo - open_loop, five rates": (-0.028, 0.101, 0.490),
        "s_ppo - kl_low, five rates": (-0.165, 0.123, 0.021),
        "paper - st_ppo, five rates": (-0.272, 0.116, 0.006),
        "s_ppo - ppo, lags 4 and 8, old_policy behaviour": (0.033, 0.013, 0.012),
        "kl_low - ppo, old policy computed anew": (0.157, 0.057, 0.006),
    },
    "sums": {
        "st_ppo - s_ppo, 3e-4": (-0.516, 0.131, 0.002),
        "st_ppo - s_ppo, 6e-4": (-0.478, 0.078, 0.001),
        "st_ppo_0.006 - s_ppo, 6e-4": (0.117, 0.039, 0.007),
        "s_ppo_0.035 - s_ppo, 3e-4": (0.019, 0.010, 0.019),
    },
}


def grid(**fields: object) -> Grid:
    given = {"config": "c.yaml", "arms": {"a": {}, "b": {}}, "settings": {"x": {}, "y": {}}, "seeds": [0, 1]}
    return Grid.model_validate(given | fields)


def found(*outcomes: tuple[str, str, int, float], device: str = "one") -> dict[Cell, Result]:
    return {Cell(*place): Result(*place, outcome, device) for *place, outcome in outcomes}  # type: ignore[arg-type,misc]


EVERY = found(
    ("a", "x", 0, 0.6), ("a", "y", 0, 0.8), ("b", "x", 0, 0.5), ("b", "y", 0, 0.3),
    ("a", "x", 1, 0.9), ("a", "y", 1, 0.5), ("b", "x", 1, 0.5), ("b", "y", 1, 0.1),
)  # fmt: skip


def test_a_difference_is_of_weighted_means_paired_by_seed() -> None:
    family = {"family": "f", "pairs": [["a", "b"]], "over": {"equal": ["x", "y"], "3 to 1": {"x": 3, "y": 1}}}
    equal, weighted = contrasts(grid(contrasts=[family]), EVERY)
    assert equal.label == "a - b, equal"
    assert equal.differences == {0: pytest.approx(0.3), 1: pytest.approx(0.4)}
    assert weighted.differences == {0: pytest.approx(0.65 - 0.45), 1: pytest.approx(0.8 - 0.4)}


def test_sides_of_different_settings_are_compared_within_a_seed() -> None:
    (one,) = contrasts(grid(contrasts=[{"family": "f", "pairs": [["a@x", "a@y"]]}]), EVERY)
    assert one.differences == {0: pytest.approx(-0.2), 1: pytest.approx(0.4)}


def test_a_contrast_without_all_seeds_has_a_difference_and_no_p_but_counts_for_holm() -> None:
    family = {"family": "f", "pairs": [["a", "b"], ["b", "a"]], "over": {"x": ["x"]}}
    whole = contrasts(grid(contrasts=[family]), EVERY)
    assert whole[0].p == pytest.approx(min(1, 2 * paired_p([0.1, 0.4])))
    part = {cell: one for cell, one in EVERY.items() if cell != Cell("a", "x", 1)}
    (first, _) = contrasts(grid(contrasts=[family]), part)
    assert first.differences == {0: pytest.approx(0.1)} and first.declared == 2
    assert math.isnan(first.p)


def test_cells_of_two_devices_are_not_compared() -> None:
    mixed = EVERY | found(("b", "x", 1, 0.5), device="another")
    given = grid(contrasts=[{"family": "f", "pairs": [["a", "b"]], "over": {"x": ["x"], "y": ["y"]}}])
    x, y = contrasts(given, mixed)
    assert not x.differences and "different devices (another; one)" in x.refused
    assert y.differences and not y.refused
    assert "refused" in text(given, mixed)


def test_only_cells_that_a_contrast_needs_are_run() -> None:
    family = {"family": "f", "pairs": [["a", "b"]], "over": {"x": ["x"]}}
    needed = grid(contrasts=[family]).cells()
    assert [cell.name for cell in needed] == ["x-a-0", "x-b-0", "x-a-1", "x-b-1"]
    assert len(grid().cells()) == 8


def test_the_page_has_every_contrast_and_mean_and_no_markup_of_the_grid(tmp_path: Path) -> None:
    given = grid(contrasts=[{"family": "<b>f</b>", "pairs": [["a", "b"]], "post_hoc": True}])
    write(given, EVERY, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;f&lt;/b&gt; (post hoc)" in page and "<b>" not in page
    assert "<td>a</td><td>0.750 ± 1.906 (2)</td>" in page, "0.6 and 0.9: 12.706 * 0.15 = 1.906"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_study_has_the_published_differences(name: str) -> None:
    given = load(STUDY / f"{name}.yaml")
    known = results.read(STUDY)
    assert all(cell in known for cell in given.cells())
    shown: dict[str, Contrast] = {one.label: one for one in contrasts(given, known)}
    for label, (middle, half, p) in PUBLISHED[name].items():
        assert shown[label].effect == pytest.approx((middle, half), abs=6e-4), label
        assert max(shown[label].p, 0.001) == pytest.approx(p, abs=6e-4), label


@pytest.mark.parametrize("name", [*PUBLISHED, "smollm2"])
def test_every_cell_of_the_study_has_a_configuration_that_loads(name: str) -> None:
    given = load(STUDY / f"{name}.yaml")
    for arm, setting in itertools.product(given.arms, given.settings):
        file.load(given.config, given.fields(Cell(arm, setting, given.seeds[0])))


TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042}  # t, 0.975 quantile


def test_the_t_distribution_has_the_quantiles_of_its_table() -> None:
    for freedom, t in TABLE.items():
        assert quantile(freedom) == pytest.approx(t, abs=5e-4)
        assert student(t, freedom) == pytest.approx(0.05, abs=1e-4)
    assert student(1, 1) == pytest.approx(0.5)
    assert student(0, 4) == 1


def test_the_interval_of_1_2_3_is_2_and_its_quantile_over_root_3() -> None:
    middle, half = mean_interval([1, 2, 3])
    assert (middle, half) == (2, pytest.approx(4.3027 / math.sqrt(3), abs=1e-4))
    assert mean_interval([7])[0] == 7 and math.isnan(mean_interval([7])[1])


def test_p_values_of_hand_calculations() -> None:
    # mean 2, standard error 1 / sqrt(3): t = 3.464, and for two degrees of freedom p = 1 - t / sqrt(2 + t^2)
    assert paired_p([1, 2, 3]) == pytest.approx(1 - math.sqrt(12 / 14))
    assert (paired_p([0.5, 0.5]), paired_p([0.0, 0.0])) == (0, 1)
    assert math.isnan(paired_p([1]))


def test_holm_multiplies_by_the_number_of_declared_tests_that_are_left_and_never_decreases() -> None:
    assert holm([0.04, 0.01, 0.03], 3) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.01], 4) == pytest.approx([0.04]), "three of four are not run yet"
    assert holm([0.9, 0.8], 2) == [1, 1]
