"""Weights, prefix cache and ratios: healthy runs pass, and each planted mistake is found by its check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.cluster.launch import process
from megatron_stppo.config.file import load
from tests.evidence.verify import plants
from tests.ranks import run_ranks
from tests.training.loop import small_run

WEIGHTS, CACHE = "weights arrive", "the prefix cache is fresh"
FIRST, LATER = "the first ratio is 1", "later ratios are not"
FULL = {  # plants that a run of all weights can have, and the check that finds each
    plants.delivered_once: WEIGHTS,
    plants.gate_and_up_swapped: WEIGHTS,
    plants.embedding_only_in_the_first_sync: WEIGHTS,
    plants.cache_kept: CACHE,
    plants.scored_at_another_temperature: FIRST,
    plants.dropout_in_the_update: FIRST,
    plants.old_policy_is_the_current: LATER,
}
ADAPTERS = {plants.adapters_never_delivered: WEIGHTS, plants.adapters_merged_twice: WEIGHTS}
Findings = dict[str, dict[str, str]]  # {plant: {check: verdict}}


def verified(root: Path, chosen: list[plants.Plant], overrides: list[str]) -> Findings:
    """Return the verdicts of these checks with each plant, and without one as "". One engine serves all."""
    from megatron_stppo.evidence.verify.arrival import arrival
    from megatron_stppo.evidence.verify.check import findings_of
    from megatron_stppo.evidence.verify.ratio import first_ratio
    from megatron_stppo.evidence.verify.stage import Stage
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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.write(tmp_path_factory.mktemp("verify")).parent


@pytest.fixture(scope="module")
def full(root: Path) -> Findings:
    return run_ranks(verified, 1, root, [*FULL], [], timeout=300)[0]


@pytest.fixture(scope="module")
def adapters(root: Path) -> Findings:
    given = ["model.lora.rank=4", "model.lora.sync=merged"]
    return run_ranks(verified, 1, root, [*ADAPTERS], given, timeout=300)[0]


@pytest.mark.parametrize("found", ["full", "adapters"])
def test_a_healthy_run_passes(found: str, request: pytest.FixtureRequest) -> None:
    verdicts = request.getfixturevalue(found)[""]
    assert verdicts == dict.fromkeys((FIRST, LATER, WEIGHTS, CACHE), "ok")


@pytest.mark.parametrize("plant", FULL, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_found_by_its_check(plant: plants.Plant, full: Findings) -> None:
    fails = [check for check, verdict in full[plant.__name__].items() if verdict == "fails"]
    assert fails == [FULL[plant]]


@pytest.mark.parametrize("plant", ADAPTERS, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_of_adapters_is_found_by_its_check(plant: plants.Plant, adapters: Findings) -> None:
    fails = [check for check, verdict in adapters[plant.__name__].items() if verdict == "fails"]
    assert fails == [ADAPTERS[plant]]
