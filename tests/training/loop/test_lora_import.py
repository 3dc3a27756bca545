"""A cold start of adapters, and a run of the real program that begins with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from tests.replicas import test_promises as promises
from tests.training.loop import small_run
from tests.training.loop.test_lora import ROUNDING, logprobs, scored
from tests.training.loop.test_resume import rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LORA = ("model.lora.rank=4", "model.lora.targets=[q_proj, v_proj, up_proj, down_proj]")
RUN = (
    "run.iterations=2",
    "run.checkpoint_every=1",
    "run.keep_every=1",
    "run.dump=all",
    "run.evaluate_every=2",
    "evaluate.tasks=3",
)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def demonstrations(path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "Which city is number 1?"}],
        "segments": [{"text": "<answer>Rome</answer>", "kind": "turn"}],
    }
    path.write_text((json.dumps(row) + "\n") * 48)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that began with the adapters of a cold start, both with 2 tensor-parallel ranks."""
    root = tmp_path_factory.mktemp("imported")
    config = small_run.write(root)
    demonstrations(root / "demonstrations.jsonl")
    given = (f"data.demonstrations={root}/demonstrations.jsonl", f"cold_start.output={root}/cold")
    rates = ("cold_start.batch_tokens=256", "cold_start.lr=0.01", "cold_start.episodes=4")
    done = small_run.run(
        "cold-start", config, *given, *LORA, *rates, "environment.kind=tests.training.loop.searching:late"
    ).succeeded()
    assert "4 episodes of data.train" in done.stderr
    said = f"are {root}/cold-2; train with model.lora.path={root}/cold-2 model.path={root}/model"
    assert said in done.stderr and not any((root / "cold").iterdir())
    (root / "cold-2").rename(root / "adapters")
    small_run.run("train", config, "run.name=trained", *RUN, f"model.lora.path={root}/adapters").succeeded()
    return root / "runs" / "trained"


def test_the_adapters_of_a_cold_start_are_those_of_the_run(run: Path) -> None:
    adapters = run.parents[1] / "adapters"
    assert sorted(path.name for path in adapters.iterdir()) == list(ADAPTER)
    assert any(
        tensor.abs().max() > 0 for key, tensor in load_file(adapters / ADAPTER[1]).items() if "_B" in key
    )
    section = yaml.safe_load((run / "config.yaml").read_text())["model"]["lora"]
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    read = {"rank": 4, "alpha": 32.0, "targets": targets, "path": str(adapters)}
    assert section == read | {"sync": "merged"}


def test_the_reference_is_the_actor_at_the_start_and_the_engine_serves_it(run: Path) -> None:
    dump = load_file(run / "dumps/iteration-00001" / "stage-0.safetensors")
    assert torch.equal(dump["reference_logprob_T"], dump["old_logprob_T"])
    later = load_file(run / "dumps/iteration-00002" / "stage-0.safetensors")
    assert not torch.equal(later["reference_logprob_T"], later["old_logprob_T"])
    for row in rows(run)[1:]:
        assert row["actor/first_kl_to_old"] == 0 and row["mismatch/mean_abs"] < 1e-6
        assert row["actor/gradient_norm"] > 0 and not row["actor/held"]


def test_the_merged_adapters_of_the_cold_start_have_the_log_probs_of_the_first_iteration(run: Path) -> None:
    root, merged = run.parents[1], run.parents[1] / "merged"
    given = [str(root / "config.yaml"), f"model.lora.path={root}/adapters", "parallel.tensor=1"]
    step_0 = str(root / "runs" / "merging" / "checkpoints")
    promises.start(["convert", "to-megatron", given[0], step_0, *given[1:]])
    promises.start(["convert", "to-hf", given[0], "latest", str(merged), "run.name=merging", *given[1:]])
    episodes, action_index_T, trainer_T = scored(run, 1)
    theirs_T = [
        logprobs(Qwen3ForCausalLM.from_pretrained(folder).eval(), episodes, action_index_T)
        for folder in (merged, root / "model")
    ]
    difference = [(own_T - trainer_T).abs().max() for own_T in theirs_T]
    assert difference[0] < ROUNDING < 1000 * ROUNDING < difference[1]


def evaluated(run: Path, folder: str, *given: str) -> list[tuple[list[int], list[float]]]:
    """Evaluate, and return (tokens, log-probs) of every turn, from runs/`folder`/trajectories."""
    more = ("parallel.tensor=1", "evaluate.tasks=3", f"run.name={folder.partition('/')[0]}")
    promises.start(["evaluate", str(run.parents[1] / "config.yaml"), *more, *given])
    (played,) = (run.parent / folder / "trajectories").glob("iteration-?????.jsonl")
    return [
        (turn["token_ids"], turn["rollout_logprob"])
        for line in played.read_text().splitlines()
        for turn in json.loads(line)["turns"]
    ]


def test_exported_adapters_that_are_imported_again_evaluate_as_their_checkpoint(run: Path) -> None:
    root = run.parents[1]
    begun = f"model.lora.path={root}/adapters"
    output = str(root / "exported")
    given = ["step_2", output, begun, "run.name=trained", "parallel.tensor=1"]
    promises.start(["convert", "to-peft", str(root / "config.yaml"), *given])
    of_step = evaluated(run, "trained/evaluate/step_2", begun, "--checkpoint", "step_2")
    assert evaluated(run, "after/evaluate/model", f"model.lora.path={output}") == of_step
    assert evaluated(run, "before/evaluate/model", begun) != of_step


def training_rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the first 2 iterations, without the numbers of evaluations."""
    return [{k: v for k, v in row.items() if not k.startswith("evaluate/")} for row in rows(run)[1:3]]


def test_a_run_resumes_only_with_the_adapters_that_it_began_with(run: Path) -> None:
    root = run.parents[1]
    given = [str(root / "config.yaml"), "run.name=trained", *RUN, "run.iterations=3", "--resume"]
    more = ["model.lora.rank=4", "model.lora.targets=[q_proj, v_proj, up_proj, down_proj]"]
    said = promises.start(["train", *given, "parallel.tensor=1", *more], status=2)
    assert "its run began with other adapters than those of this run's model.lora.path; give those" in said
    small_run.run("train", root / "config.yaml", *given[1:], f"model.lora.path={root}/adapters").succeeded()
    assert rows(run)[-1]["mismatch/mean_abs"] < 1e-6


def test_every_log_prob_is_that_of_the_adapters_that_its_token_names(run: Path) -> None:
    said = promises.start(["audit", str(run), "parallel.tensor=1"])
    assert "passed; " in said and "not audited" not in said


def test_what_reads_a_checkpoint_does_not_need_the_folder_of_the_adapter(run: Path) -> None:
    root, saved = run.parents[1], str(run / "config.yaml")
    adapters, given = root / "adapters", ("parallel.tensor=1", "evaluate.tasks=3")
    adapters.rename(root / "away")
    try:
        for kind, file in (("to-peft", ADAPTER[1]), ("to-hf", "model.safetensors")):
            promises.start(["convert", kind, saved, "step_2", str(root / f"{kind} alone"), given[0]])
            assert load_file(root / f"{kind} alone" / file)
        promises.start(["evaluate", saved, "--checkpoint", "step_1", *given])
        said = promises.start(["audit", str(run), given[0]])
        assert "versions without a readable checkpoint, whose tokens are not audited: 0" in said
        assert f"version 0 needs the folder model.lora.path={adapters}" in said
        assert "passed; " in said
        refused = promises.start(["evaluate", saved, *given], status=2)
        assert f"model.lora.path={adapters}: no such folder" in refused
    finally:
        (root / "away").rename(adapters)
