from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.training.update import faults, layouts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "hf"
    layouts.write_model(folder)
    return str(folder)


def test_a_nan_on_one_rank_skips_the_step_on_all_and_leaves_weights_and_optimizer_untouched(
    model: str,
) -> None:
    """Two data-parallel ranks, and two tensor-parallel ranks of which only one may have a NaN loss.

    A minibatch without a live token leaves them untouched too, after a step that has given Adam momentum.
    """
    skipped = {role: {f"{role}/skipped": 1.0} for role in ("actor", "critic")}
    both = skipped["actor"] | skipped["critic"]
    for found in itertools.chain(*run_ranks(faults.step_on_faults, 2, model, (1, 2))):
        assert found == {
            "actor's loss": (skipped["actor"], True, 1, 0),
            "actor's gradient": (skipped["actor"], True, 2, 0),
            "norm": (skipped["actor"], True, 3, 0),
            "critic's loss": (skipped["critic"], True, 3, 1),
            "critic's gradient": (skipped["critic"], True, 3, 2),
            "log-prob": (both, True, 4, 3),
            "reward": (both, True, 5, 4),
            "log-prob of the update": (both, True, 6, 5),
            "reward, without scores": (both, True, 7, 6),
            "none": (dict.fromkeys(both, 0.0), False, 7, 6),
            "no live token": (dict.fromkeys(both, 0.0), True, 7, 6),
        }


def test_a_flipped_byte_falls_back_to_the_older_step_and_two_are_refused(model: str, tmp_path: Path) -> None:
    ((iteration, complaint),) = run_ranks(faults.load_after_damage, 1, model, str(tmp_path))
    assert iteration == 1
    assert "step_2" in complaint and "step_1" in complaint and "does not match the manifest" in complaint
