"""Weights, prefix cache and ratios: healthy runs pass, and each planted mistake is found by its check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.cluster.launch import process
from megatron_stppo.config.file import load
from tests.evidence.checks import plants_of_serving as plants
from tests.ranks import run_ranks
from tests.training.loop import small_run

WEIGHTS, CACHE = "weights arrive", "the prefix cache is fresh"
FIRST = "the first ratio is 1"
OF_WEIGHTS = {  # plants, and the check that finds each
    plants.delivered_once: WEIGHTS,
    plants.cache_kept: CACHE,
    plants.scored_at_another_temperature: FIRST,
}
MORE = {
    plants.gate_and_up_swapped: WEIGHTS,
    plants.embedding_only_in_the_first_sync: WEIGHTS,
    plants.dropout_in_the_update: FIRST,
}
OF_ADAPTERS = {plants.adapters_never_delivered: WEIGHTS}
MORE_OF_ADAPTERS = {plants.adapters_merged_twice: WEIGHTS}
MERGED = ("model.lora.rank=4", "model.lora.sync=merged")
Findings = dict[str, dict[str, str]]  # {plant: {check: verdict}}


def verified(root: Path, chosen: Iterable[plants.Plant], overrides: Sequence[str]) -> Findings:
    """Return the verdicts of these checks with each plant, and without one as "". One engine serves all."""
    from megatron_stppo.evidence.bench.stage import Stage
    from megatron_stppo.evidence.checks.arrival import arrival
    from megatron_stppo.evidence.checks.reference import first_ratio
    from megatron_stppo.evidence.verification import findings_of
    from megatron_stppo.training.colocated import assemble, engine_sync

    config = load(root / "config.yaml", ["parallel.tensor=1", "environment.max_turns=3", *overrides])
    pytest.MonkeyPatch().setattr(process, "join", lambda *a: None)  # run_ranks has
    worker: Any = assemble(config.beside(small_run.ROOT))
    found, begun = dict[str, dict[str, str]](), None
    for plant in (None, *chosen):
        with pytest.MonkeyPatch.context() as patch:
            if plant is not None:
                plant(patch, worker)
            worker.reshard = engine_sync(worker.learner, worker.engine)
            stage = Stage.of(config, worker, plants.FIRST)
            begun = begun or stage.weights()
            checks = (first_ratio, arrival)
            verdicts = {one.check: one.verdict for one in findings_of(stage, checks)}
            found["" if plant is None else plant.__name__] = verdicts
            stage.set_weights(begun)
    return found


@pytest.mark.parametrize(
    ("given", "overrides"),
    [
        pytest.param(OF_WEIGHTS, (), id="weights"),
        pytest.param(MORE, (), id="more of weights", marks=pytest.mark.long),
        pytest.param(OF_ADAPTERS, MERGED, id="adapters", marks=pytest.mark.long),
        pytest.param(MORE_OF_ADAPTERS, MERGED, id="more of adapters", marks=pytest.mark.long),
    ],
)
def test_a_healthy_run_passes_and_each_planted_mistake_is_found_by_its_check(
    given: dict[plants.Plant, str], overrides: Sequence[str], tmp_path: Path
) -> None:
    small_run.write(tmp_path)
    found = run_ranks(verified, 1, tmp_path, [*given, plants.small_steps], overrides, timeout=300)[0]
    assert found.pop("") == dict.fromkeys((FIRST, WEIGHTS, CACHE), "ok")
    small = dict.fromkeys((WEIGHTS, CACHE), "skipped")
    assert found.pop("small_steps") == {FIRST: "ok"} | small
    fails = {name: [check for check in lines if lines[check] == "fails"] for name, lines in found.items()}
    assert fails == {plant.__name__: [check] for plant, check in given.items()}
