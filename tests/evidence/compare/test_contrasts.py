"""Contrasts of results that are written down here, and those of docs/study."""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest

from megatron_stppo.config import file
from megatron_stppo.evidence.compare.contrasts import (
    Result,
    contrasts,
    holm,
    mean_interval,
    paired_p,
    quantile,
    read,
    student,
    text,
    write,
)
from megatron_stppo.evidence.compare.grid import Cell, Grid, load
from tests.documented import NAME, rows

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "docs" / "study"
GRIDS = ("search", "sums")
KNOWN = read(STUDY)
RATES = {"rate_1.5": 1, "rate_3": 2, "rate_6": 2, "rate_12": 2, "rate_24": 1}  # weights, by trapezoids
# tasks of the study's table of results: the grid, and what its contrasts are over
OVER = {
    "search, five rates": ("search", "five rates"),
    "search, lags 4 and 8": ("search", "lags 4 and 8, old_policy behaviour"),
    "search, lag 8": ("search", "old policy computed anew"),
    "sums, 3e-4": ("sums", "3e-4"),
    "sums, 6e-4": ("sums", "6e-4"),
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


def test_every_row_of_the_studys_results_is_a_declared_contrast_of_its_cells() -> None:
    grids = {name: load(STUDY / f"{name}.yaml") for name in GRIDS}
    assert all(cell in KNOWN for given in grids.values() for cell in given.cells())
    every = {(name, of.label): of for name in GRIDS for of in contrasts(grids[name], KNOWN)}
    table = [cells for cells in rows("study.md") if len(cells) == 6 and cells[1] in OVER]
    assert len(table) == 12
    for _, task, pair, difference, p, _ in table:
        name, over = OVER[task]
        label = f"{' - '.join(NAME.findall(pair)[:2])}, {over}"
        of = every[name, label]
        digits = 3 if of.p < 0.1 else 2
        assert p.split(",")[0] == ("< 0.001" if of.p < 0.001 else f"{of.p:.{digits}f}"), label
        assert difference == shown(list(of.differences.values())), label
        assert of.family.post_hoc == ("post hoc" in p), label


def shown(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean, and half of its interval, as the pages write them."""
    middle, half = mean_interval(values)
    return f"{middle:+z.{digits}f} ± {half:.{digits}f}"


def real(metric: str) -> dict[Cell, dict[int, float]]:
    """Return a metric of the real model's cells by iteration, from the starting model of the longest run."""
    with (STUDY / "smollm2_h200.csv").open(encoding="utf-8") as file:
        played = [row for row in csv.DictReader(file) if row[metric]]
    cells: dict[tuple[Cell, str], dict[int, float]] = {}
    for row in played:
        place = Cell(row["arm"], row["setting"], int(row["seed"])), row["cold_start"]
        cells.setdefault(place, {})[int(row["iteration"])] = float(row[metric])
    return {cell: values for (cell, _), values in cells.items() if max(values) >= 36}


HELD_OUT = real("evaluate/exact_match")
OUTCOMES = {cell: of.outcome for cell, of in KNOWN.items()}
OUTCOMES |= {cell: fmean(x for n, x in of.items() if n > 20) for cell, of in HELD_OUT.items()}
# Sentences of a page, with [arm@setting], a mean, and [left - right], a difference, in place of the numbers
PLACE = re.compile(r"\[(\S+@\w[\w.]*)(?: - (\S+@\w[\w.]*))?(, 3 digits)?(, 12 seeds)?\]")
STATED = [
    "study: `st_ppo` [st_ppo@harsh_2], `s_ppo` [s_ppo@harsh_2], `so_grpo` [so_grpo@harsh_2]; without",
    "study: `turn_ppo` [turn_ppo@harsh_2_half], `ppo` [ppo@harsh_2_half], `grpo` [grpo@harsh_2_half], which",
    "study: which is [grpo@harsh_2_half - so_grpo@harsh_2, 3 digits] above `so_grpo`",
    "study: `st_ppo` at 6e-4 is [turn_ppo@rate_3 - st_ppo@rate_6] ([turn_ppo@rate_3], [st_ppo@rate_6]; "
    "[turn_ppo@rate_6] without either), `ppo` - `s_ppo` [ppo@rate_3 - s_ppo@rate_6].",
    "study: `grpo` [st_ppo@harsh_2 - grpo@harsh_2], `st_ppo` - `so_grpo` [st_ppo@harsh_2 - so_grpo@harsh_2].",
    "study: one epoch): [st_ppo@gentle - grpo@gentle], [st_ppo@gentle - so_grpo@gentle]; the correction",
    "study: nothing there ([st_ppo@gentle - turn_ppo@gentle], [s_ppo@gentle - ppo@gentle]).",
    "study: [st_ppo@rates - s_ppo@rates] over five rates (not declared), [st_ppo@harsh_2 - s_ppo@harsh_2] in",
    "study: at lag 4 is [st_ppo_0.006@sums_3_lag_4 - s_ppo@sums_3_lag_4] at 3e-4",
    "study: at 3e-4 and [st_ppo_0.006@sums_6_lag_4 - s_ppo@sums_6_lag_4] at 6e-4.",
    "study: no correction ([paper@rates - turn_ppo@rates, 3 digits] over five rates",
    "study: [st_ppo_paper@harsh_2 - turn_ppo@harsh_2] in the first grid)",
    "study: worse than `st_ppo` ([paper@rates - st_ppo@rates]).",
    "study: with short turns: [s_ppo@rates - open_loop@rates] over five rates",
    "study: [s_ppo@rate_6 - open_loop@rate_6, 3 digits, 12 seeds] at 6e-4 (12 seeds, two machines)",
    "study: **`kl` - `ppo`** is [kl@rate_100 - ppo@rate_100], **`st_ppo` - `kl`** "
    "[st_ppo@rate_100 - kl@rate_100] (not declared)",
    "study: `kl`, a primary contrast, is [st_ppo_kl@rate_100 - kl@rate_100]",
    "study: interval of all, [st_ppo@rate_100 - ppo@rate_100] (p",
    "algorithms: from [kl_low@rate_1.5] to [kl_low@rate_24] with `kl`, [st_ppo@rate_1.5] to "
    "[st_ppo@rate_24] with",
    "algorithms: for every turn), [ppo@rate_1.5] to [ppo@rate_24] with `ppo`",
    "algorithms: and 0.006 (0.2 / 32) ended at [st_ppo@sums_3_lag_0], [st_ppo_0.035@sums_3_lag_0] and "
    "[st_ppo_0.006@sums_3_lag_0]; `turn_ppo` with 0.006 at [turn_ppo_0.006@sums_3_lag_0]; with a ratio",
    "algorithms: per token, `s_ppo` with 0.2 and 0.035 at [s_ppo@sums_3_lag_0] and "
    "[s_ppo_0.035@sums_3_lag_0], `ppo` at [ppo@sums_3_lag_0]",
    "README: [ppo@rate_100], [st_ppo@rate_100], [kl@rate_100]; [ppo@rate_10] |",
    "README: | [st_ppo@rate_6]; [turn_ppo@rate_6]; [turn_ppo@rate_3] |",
    "README: | [st_ppo@rates - turn_ppo@rates]; [s_ppo@rates - open_loop@rates] |",
]


def outcomes(side: str) -> dict[int, float]:
    """Return the weighted mean of the side's settings by seed, of seeds for which it has all."""
    arm, setting = side.split("@")
    weights = RATES if setting == "rates" else {setting: 1}
    cells = {seed: {of: Cell(arm, of, seed) for of in weights} for seed in range(17)}
    return {
        seed: sum(weights[name] * OUTCOMES[cell] for name, cell in of.items()) / sum(weights.values())
        for seed, of in cells.items()
        if all(cell in OUTCOMES for cell in of.values())
    }


def number(place: re.Match[str]) -> str:
    left, right, digits, more = place.groups()
    seeds = [seed for seed in outcomes(left) if seed < (17 if more else 10)]
    if right is None:
        return f"{fmean(outcomes(left)[seed] for seed in seeds):.2f}"
    return shown([outcomes(left)[n] - outcomes(right)[n] for n in seeds], 3 if digits else 2)


@pytest.mark.parametrize("sentence", STATED)
def test_the_pages_state_what_the_cells_of_the_study_say(sentence: str) -> None:
    name, text = PLACE.sub(number, sentence).split(": ", 1)
    page = ROOT / ("README.md" if name == "README" else f"docs/{name}.md")
    assert text in " ".join(page.read_text(encoding="utf-8").split())


def test_the_table_of_the_real_model_is_that_of_its_iterations() -> None:
    rewards, table = real("reward/mean"), [cells for cells in rows("study.md") if len(cells) == 5][2:]
    for (_, *written), arm in zip(table, ("ppo", "st_ppo", "kl", "st_ppo_kl"), strict=True):
        cells = [Cell(arm, "rate_100", seed) for seed in range(3)]
        low = [min(x for n, x in HELD_OUT[cell].items() if n >= 12) for cell in cells]
        falls = [a - b >= 0.2 for cell in cells for a, b in itertools.pairwise(rewards[cell].values())]
        assert [cell.replace(" *", "").strip("*") for cell in written] == [
            ", ".join(f"{OUTCOMES[cell]:.3f}" for cell in cells),
            f"{fmean(OUTCOMES[cell] for cell in cells):.3f}",
            ", ".join(f"{value:.2f}" for value in low),
            str(sum(falls)),
        ], arm


@pytest.mark.parametrize("name", [*GRIDS, "smollm2"])
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
