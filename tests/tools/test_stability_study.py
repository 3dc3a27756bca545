"""tools/stability_study.py: the planned runs and the report of finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_stppo.config import Config
from megatron_stppo.config_file import load
from megatron_stppo.telemetry import rows
from tools import stability_study
from tools.study import collect, matrix
from tools.study.adapter_settings import ADAPTED
from tools.study.bases import SEARCH, SUMS
from tools.study.figures import STYLES, cut, table
from tools.study.lag_settings import LAGGED, LAGS, REPEATED, SUMMED
from tools.study.ledger import StudyLedger
from tools.study.report import BEGIN, END, TABLES, sections
from tools.study.tasks import tasks_of

CONFIG = SEARCH.config


# one of each kind of the settings that lag: test_settings_that_lag_differ_... compares them with each other
ONE_OF_EACH = ("lag_4_behaviour", "lag_4_mask", "sums_3_lag_4")
OTHERS = [name for name in matrix.SETTINGS if name not in {*ADAPTED, *LAGGED, *REPEATED, *SUMMED}]


@pytest.mark.parametrize("setting", [*OTHERS, *ONE_OF_EACH])
def test_algorithms_of_a_setting_differ_in_the_algorithm_section_only(setting: str) -> None:
    config = matrix.Run(setting, "ppo", 3).base.config
    runs = [load(config, matrix.Run(setting, name, 3).overrides()) for name in matrix.ALGORITHMS]
    sections = [run.model_dump(exclude={"algorithm"}) for run in runs]
    assert all(other == sections[0] for other in sections)
    untouched = ("gamma", "lam", "kl_coefficient", "entropy_coefficient", "whiten")
    for field in untouched:
        assert len({getattr(run.algorithm, field) for run in runs}) == 1, field
    bounds = {(run.algorithm.clip_low, run.algorithm.clip_high) for run in runs}
    assert bounds == {(0.2, 0.2), (0.035, 0.035), (0.006, 0.006)}


@pytest.mark.parametrize("name", matrix.NARROWED)
def test_an_algorithm_with_other_bounds_differs_in_nothing_else(name: str) -> None:
    of, _, bound = name.rpartition("_")
    pair = [load(SUMS.config, matrix.Run("sums_3_lag_0", arm, 3).overrides()).algorithm for arm in (name, of)]
    assert (pair[0].clip_low, pair[0].clip_high) == (float(bound), float(bound))
    forms = [one.model_dump(exclude={"clip_low", "clip_high"}) for one in pair]
    assert forms[0] == forms[1]


# `kl` of the study has the target that was the default when it was run; `kl_low` has today's
NAMED = {"kl": "kl_low"}


@pytest.mark.parametrize("preset", ["grpo", "so_grpo", "paper", *matrix.ARMS, *matrix.OTHERS])
def test_the_study_has_every_preset_as_it_is(preset: str) -> None:
    studied = load(CONFIG, matrix.Run("gentle", NAMED.get(preset, preset), 0).overrides()).algorithm
    assert studied == load(CONFIG, [f"algorithm.preset={preset}"]).algorithm


def test_the_papers_form_of_the_first_round_is_the_preset_of_that_name_but_for_the_weights_of_tokens() -> (
    None
):
    a = load(CONFIG, matrix.Run("gentle", "st_ppo_paper", 0).overrides()).algorithm
    preset = load(CONFIG, ["algorithm.preset=paper"]).algorithm
    assert (a.aggregation, preset.aggregation) == ("token_mean", "sequence_mean_token_mean")
    assert a == preset.model_copy(update={"preset": a.preset, "aggregation": a.aggregation})
    assert (a.segments, a.correction, a.correction_apply) == ("turn", "gradient", "gradient")
    assert (a.correction_unit, a.correction_floor) == ("mean", 0)


def test_a_seed_is_finished_before_the_next_one_and_its_runs_share_a_start(tmp_path: Path) -> None:
    tasks = tasks_of(matrix.select(["ppo", "st_ppo"], [0, 4], ["gentle"]), tmp_path)
    assert [(task.name, task.needs) for task in tasks[:4]] == [
        ("build-0", ""),
        ("cold-start-0", "build-0"),
        ("gentle-ppo-0", "cold-start-0"),
        ("gentle-st_ppo-0", "cold-start-0"),
    ]
    assert len({task.key for task in tasks}) == 8 == len(tasks)
    moved = tasks_of(matrix.select(["ppo", "st_ppo"], [0, 4], ["gentle"]), tmp_path / "elsewhere")
    assert [task.key for task in moved] == [task.key for task in tasks], "a key does not depend on the folder"


def test_settings_that_lag_differ_in_their_lag_and_in_how_it_is_seen() -> None:
    def made(setting: str, arm: str = "ppo") -> Config:
        return load(CONFIG, matrix.Run(setting, arm, 5).overrides())

    base = made("lag_0")
    assert (base.serving.replicas, base.serving.update, base.serving.max_staleness) == (1, "complete", 0)
    assert (base.update.actor.lr, base.update.critic.lr, base.update.epochs) == (3e-4, 1.8e-3, 1)
    for lag in LAGS:
        own = base.serving.model_copy(update={"max_staleness": lag})
        assert made(f"lag_{lag}") == base.model_copy(update={"serving": own})
        assert made(f"lag_{lag}_behaviour").algorithm.old_policy == "behaviour"
        assert {made(f"lag_{lag}_{x}").algorithm.mismatch for x in ("truncate", "mask")} == {
            "truncate",
            "mask",
        }
    assert all(made(name) == made(f"lag_{lag}{suffix}") for name, (lag, suffix) in REPEATED.items())
    most = (1 + max(LAGS)) * base.rollout.tasks_per_iteration * base.rollout.samples_per_task
    assert base.serving.concurrency is not None and base.serving.concurrency >= most, "all begin at once"
    profile = made("lag_0", "open_loop_4").algorithm.rate_profile
    assert profile == matrix.PROFILE[: base.update.epochs * base.update.minibatches] == [1, 0.55, 0.54, 0.48]


def test_a_seed_of_another_example_has_a_build_and_a_cold_start_of_its_own(tmp_path: Path) -> None:
    runs = matrix.select(["ppo"], [5], ["lag_4", "sums_3_lag_4"])
    tasks = tasks_of(runs, tmp_path)
    assert [(task.name, task.needs, task.processes) for task in tasks] == [
        ("build-5", "", 1),
        ("cold-start-5", "build-5", 1),
        ("lag_4-ppo-5", "cold-start-5", 2),
        ("build-sums-5", "", 1),
        ("cold-start-sums-5", "build-sums-5", 1),
        ("sums_3_lag_4-ppo-5", "cold-start-sums-5", 2),
    ]
    assert len({task.key for task in tasks}) == 6 and len({task.folder for task in tasks}) == 6
    last = tasks[-1].command
    assert str(SUMS.config) in last and f"model.path={tmp_path / 'seed-5-sums' / 'cold-start'}" in last
    assert not any(word.startswith("environment.") for word in last), "it searches no index"


def test_unknown_names_in_arguments_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    where = ["--root", str(tmp_path)]
    assert matrix.seeds_of("0-2,7") == [0, 1, 2, 7]
    for wrong in (["--only", "sppo"], ["--settings", "mild"], ["--seeds", "1-x"]):
        assert stability_study.main([*wrong, *where]) == 2
        assert wrong[1] in capsys.readouterr().err


def rows_of(exact_match: list[float], **changes: Any) -> list[dict[str, Any]]:
    """Return rows 0, 1, 2, ... of a run that evaluates at each iteration, with gradient norms 0, 1, 2, ..."""
    found: list[dict[str, Any]] = []
    for iteration, value in enumerate(exact_match):
        row = dict.fromkeys(collect.METRICS, 0.5) | {"iteration": iteration, "seconds": 2.0}
        found.append(row | {collect.EXACT_MATCH: value, "actor/gradient_norm": float(iteration)})
    found[-1] |= changes
    return found


def test_the_row_of_a_run_matches_a_hand_calculation() -> None:
    run = matrix.Run("gentle", "ppo", 0)
    row = collect.summary(run, rows_of([0.2, 0.5, 0.7, 0.9, 0.4]), False, seconds=25.0)
    assert (row["first"], row["best"], row["final"]) == (0.2, 0.9, pytest.approx(2 / 3))
    assert (row["to_0.6"], row["to_0.9"], row["collapsed"], row["collapse_began"]) == (2, 3, 0, None)
    assert (row["gradient_norm"], row["gradient_norm_p95"]) == (2.0, 4.0)
    assert (row["seconds"], row["seconds_outside"]) == (25.0, 15.0)


def test_a_run_collapses_by_its_exact_match_or_by_a_number_that_is_missing() -> None:
    run = matrix.Run("gentle", "ppo", 0)
    fallen = collect.summary(run, rows_of([0.9, *[0.4] * 10]), False, 1.0)
    assert (fallen["collapsed"], fallen["collapse_began"], fallen["not_finite"]) == (1, 1, 0)
    broken = collect.summary(run, rows_of([0.9, 0.9], **{"actor/kl_to_old": None}), False, 1.0)
    assert (broken["collapsed"], broken["collapse_began"], broken["not_finite"]) == (1, None, 1)
    ended = collect.summary(run, rows_of([0.9, 0.9]), True, 1.0)
    assert (ended["collapsed"], ended["not_finite"]) == (1, 1)


def test_lines_of_a_figure_have_distinct_styles() -> None:
    for group, beside in TABLES.items():
        names = [*beside, *matrix.GROUPS[group]]
        assert len({STYLES[name] for name in names}) == len(names)


def test_one_outlying_run_does_not_flatten_the_others() -> None:
    values = np.array([1.0, 1.0, 1.0, 1e-9, 1e9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert cut(values, 1e-10, 1e10) == (1 / 30, 30.0), "zeros are not on a logarithmic axis"
    assert cut(values, 0.5, 2.0) == (0.5, 2.0), "never wider than the data"
    assert cut(np.zeros(3), 0.1, 10.0) == (0.1, 10.0)


def test_a_curve_has_the_iterations_that_all_seeds_have() -> None:
    of_seed = {0: [1.0, 3.0, 5.0, 7.0, 9.0], 1: [0.0, 0.0, 2.0, None, 4.0]}
    rows = [
        {"seed": seed, "iteration": i, "x": x}
        for seed, values in of_seed.items()
        for i, x in enumerate(values, 1)
    ]
    iterations, values = table(rows, "x", 2)
    assert iterations.tolist() == [1.5, 4.0]
    assert values.tolist() == [[2.0, 7.0], [0.0, 3.0]]


def finish(
    run: matrix.Run, exact_match: list[float], root: Path, ledger: StudyLedger, *overrides: str
) -> None:
    """Write the files of a finished run of 10 iterations."""
    path = root / "runs" / run.name
    path.mkdir(parents=True)
    config = load(CONFIG, [*run.overrides(10), f"run.root={root}", *overrides])
    (path / "config.yaml").write_text(config.dump())
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(exact_match)))
    ledger.begin(run.name, "k")
    ledger.end(run.name, "done", 30.0)


def test_finished_runs_reach_the_document_and_replace_only_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    document = folder / "first-round.md"
    document.write_text(f"before\n{BEGIN}of last time\n{END}after\n")
    root = tmp_path / "runs"
    root.mkdir()
    given = {
        ("ppo", 0): [0.4, *[0.1] * 10],
        ("ppo", 1): [0.4] * 11,
        ("st_ppo", 0): [0.4, *[0.9] * 10],
        ("ppo", 100): [0.2, 0.4],
    }
    ledger = StudyLedger(root / "ledger.json")
    for (name, seed), values in given.items():
        finish(matrix.Run("gentle", name, seed), values, root, ledger)
    arguments = ["--report", "--root", str(root), "--docs", str(tmp_path), "--iterations", "10"]
    arguments += ["--settings", "gentle", "--seeds", "0,1,100"]
    assert stability_study.main(arguments) == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "of last time" not in text
    assert "| `ppo` | 2 | 1 (0.09 to 0.91) |" in text
    assert "| gentle | `ppo` | 100 | 0.40 | 0.30 | no |" in text, (
        "a run of the pilot, which is in no other table"
    )
    assert "| `ppo` |  | -0.80 (0/1) |" in text, "one seed in common, so no interval"
    assert (folder / "gentle.png").stat().st_size > 0
    kept = [path.read_bytes() for path in sorted(folder.glob("[cr]*"))]
    stability_study.gather(matrix.select(["family"], [0], ["gentle"]), ledger, root, folder, 10)
    assert [path.read_bytes() for path in sorted(folder.glob("[cr]*"))] == kept, "each run once"
    assert len(collect.read_parquet(folder / "curves.parquet")) == 11 + 11 + 11 + 2


def test_a_control_is_compared_with_its_setting(tmp_path: Path) -> None:
    root, study = tmp_path / "runs", tmp_path / "study"
    root.mkdir()
    ledger = StudyLedger(root / "ledger.json")
    of = {
        ("harsh_2", "st_ppo"): (0.9, 0.8),
        ("harsh_2", "ppo"): (0.2, 0.4),
        ("harsh_2_half", "ppo"): (0.5, 0.5),
    }
    runs = {(key, seed): matrix.Run(*key, seed) for key in of for seed in (0, 1)}
    for (key, seed), run in runs.items():
        finish(run, [of[key][seed]] * 11, root, ledger)
    stability_study.gather(list(runs.values()), ledger, root, study, 10)
    lines = sections(study, study)
    assert "|  | `harsh_2, ppo` | `harsh_2, st_ppo` |" in lines
    # 0.5 minus 0.2 and 0.4: 0.2 +- 12.706 * 0.0707 / sqrt(2); minus 0.9 and 0.8: -0.35 +- 0.64
    assert "| `ppo` | +0.20 ± 1.27 (2/2) | -0.35 ± 0.64 (0/2) |" in lines


def test_estimators_are_compared_over_the_steps_that_clipped_and_without_the_pilot(tmp_path: Path) -> None:
    """The exact norms are 1, 2, 4. One estimate is twice the norm; the other is 4, 2, 1. The third of the
    four steps clipped nothing."""
    columns = {
        "actor/clipping_bias_gradient": [1.0, 2.0, 0.0, 4.0],
        "actor/clipping_bias_logit": [2.0, 4.0, 0.0, 8.0],
        "actor/clipping_bias_coefficient": [4.0, 2.0, 0.0, 1.0],
        "actor/clip_fraction": [0.1, 0.4, 0.0, 0.2],
        "actor/gradient_norm": [1.0] * 4,
        "actor/correction_scale": [0.5, 0.25, 1.0, 0.125],
    }
    runs, root = [matrix.Run("gentle", "st_ppo_probe", seed) for seed in (0, matrix.PILOT)], tmp_path / "runs"
    root.mkdir()
    ledger, study = StudyLedger(root / "ledger.json"), tmp_path / "study"
    for run in runs:
        finish(run, [0.4] * 11, root, ledger)
        steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        rows.write_steps(root / "runs" / run.name / "steps.jsonl", 1, steps)
    stability_study.gather(runs, ledger, root, study, 10)
    assert len(collect.read_parquet(study / "steps.parquet")) == 8
    lines = sections(study, study)
    assert "| gentle | `st_ppo_probe` | 4 | 75% | logit | 1.00 | 2.00 | 2.00 | 2.00 |" in lines
    assert "| gentle | `st_ppo_probe` | 4 | 75% | coefficient | -1.00 | 0.40 | 1.00 | 3.40 |" in lines
    # logs of 1, 2, 4 against those of 1, 4, 2: half of the spread agrees
    assert "| gentle | `st_ppo_probe` | 4 | 75% | clip fraction | 0.50 |  |  |  |" in lines
    assert (study / "estimators.png").stat().st_size > 0
    assert "| gentle | `st_ppo_probe` | 1 | 100% | 0.100 | 0.500 | 0.500 | 0.500 | 0.500 |" in lines
    assert "| gentle | `st_ppo_probe` | 3 | 0% | 0.000 | 1.000 | 1.000 | 1.000 | 1.000 |" in lines


def test_runs_with_other_settings_are_not_reported(tmp_path: Path) -> None:
    run, ledger, root = matrix.Run("gentle", "ppo", 0), StudyLedger(tmp_path / "ledger.json"), tmp_path
    finish(run, [0.4] * 11, root, ledger, "update.epochs=3", "algorithm.clip_high=0.3")
    with pytest.raises(ValueError, match=r"values of update\.epochs, algorithm; move it"):
        stability_study.gather([run], ledger, root, tmp_path / "study", 10)
    with pytest.raises(ValueError, match=r"values of run\.iterations, update\.epochs, algorithm"):
        stability_study.gather([run], ledger, root, tmp_path / "study")
    assert not (tmp_path / "study").exists()


def test_a_shorter_trial_is_not_merged_into_the_results(tmp_path: Path) -> None:
    def put(name: str, seed: int, iterations: int, not_finite: bool = False) -> None:
        run = matrix.Run("gentle", name, seed)
        row = collect.summary(run, rows_of([0.4] * (iterations + 1)), not_finite, 9.0)
        collect.merge(tmp_path, [row], [], [])

    put("ppo", 0, 8)
    put("ppo", 1, 3, not_finite=True)
    put("ppo", matrix.PILOT, 5)
    before = (tmp_path / "runs.csv").read_bytes()
    with pytest.raises(ValueError, match=r"gentle would hold runs of \[4, 8\] iterations"):
        put("st_ppo", 0, 4)
    assert (tmp_path / "runs.csv").read_bytes() == before


def test_results_of_other_settings_are_never_replaced(tmp_path: Path) -> None:
    run = matrix.Run("gentle", "ppo", 0)
    ledger = StudyLedger(tmp_path / "ledger.json")
    ledger.begin(run.name, "of before")
    ledger.end(run.name, "done", 1.0)
    given = ["--root", str(tmp_path), "--only", "ppo", "--settings", "gentle", "--seeds", "0", "--plan"]
    assert stability_study.main(given) == 2


def test_curves_that_were_collected_with_old_names_are_read_with_the_new_ones() -> None:
    row = collect.read_parquet(stability_study.ROOT / "docs" / "study" / "curves.parquet")[0]
    assert set(collect.METRICS) <= row.keys()
    assert "rollout/searched" not in row
