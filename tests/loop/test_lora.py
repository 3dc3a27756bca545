"""A run of the real program with adapters: served as a merged model, killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loop import small_run
from tests.loop.test_resume import rows

LORA = ("model.lora.rank=4", "run.iterations=3", "run.checkpoint_every=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(folder of 3 uninterrupted iterations, folder of a run that was killed after step 1 and resumed)."""
    root = tmp_path_factory.mktemp("lora")
    config, straight = small_run.write(root), root / "runs" / "straight"
    done = small_run.run("train", config, "run.name=straight", *LORA)
    assert done.returncode == 0, done.stderr[-3000:]
    resumed = straight.with_name("resumed")
    small_run.train_until(resumed / "checkpoints" / "LATEST", config, "run.name=resumed", *LORA)
    done = small_run.run(
        "train", config, "run.name=resumed", "update.offload=all", "run.keep_checkpoints=3", *LORA, "--resume"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "megatron-stppo: resumed from step_" in done.stderr
    return straight, resumed


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_engine_serves_what_the_trainer_computes_with_adapters(runs: tuple[Path, Path]) -> None:
    for row in rows(runs[0]):
        assert row["actor/first_kl_to_old"] == 0, "ratios that are not exactly 1"
        assert row["mismatch/mean_abs"] < 1e-6
        assert row["actor/gradient_norm"] > 0 and not row["actor/held"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_resumed_run_with_adapters_has_the_bits_of_a_whole_one(runs: tuple[Path, Path]) -> None:
    straight, resumed = map(rows, runs)
    assert resumed == straight and len(straight) == 3
    ended = [json.loads((run / "checkpoints/step_3/MANIFEST.json").read_text())["files"] for run in runs]
    tensors = [name for name in ended[0] if name.endswith(".distcp")]
    assert {name.split("/")[0] for name in tensors} == {"actor", "critic"}
    assert {name: ended[1][name] for name in tensors} == {name: ended[0][name] for name in tensors}
    weights = (runs[0].parents[1] / "model" / "model.safetensors").stat().st_size
    state = json.loads((runs[0] / "checkpoints/step_3/state.json").read_text())
    assert state["lora"]["rank"] == 4 and len(state["lora"]["trunk"]) == 64
    assert sum(ended[0][name]["bytes"] for name in tensors if name.startswith("actor")) < weights
