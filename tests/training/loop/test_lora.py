"""A run of the real program with adapters, served merged with the weights or alone: killed and resumed, and
what the other commands make of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from tests.replicas import test_promises as promises
from tests.rollout.vllm.tiny import reference_logprobs
from tests.training.loop import small_run
from tests.training.loop.test_resume import rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LORA = (
    "model.lora.rank=4",
    "run.iterations=3",
    "run.checkpoint_every=1",
    "run.keep_every=1",
    "run.dump=all",
    "run.evaluate_every=3",
    "evaluate.tasks=3",
)
ROUNDING = 1e-5  # nats, as for `audit` in float32
# What an update sends to an engine of one rank, in MB. The model has 2 layers of width 64 with queries of
# 128, keys and values of 64, and 96 in the MLP. merged: the numbers of these layers' weights are
# 2 * (64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 96); adapter: those of A and B are, with rank 4,
# 2 * 4 * (192 + 128 + 128 + 192 + 3 * 160). A number takes 4 bytes.
SENT = {"merged": 0.344064, "adapter": 0.03584}
# {what alpha / rank and the number of ranks are: (ranks, overrides)}. 1.5 * B is rounded in bfloat16, 8 * B
# is not.
ROUNDED = {
    "8, 1 rank": (1, ("parallel.tensor=1",)),
    "1.5, 1 rank": (1, ("parallel.tensor=1", "model.lora.alpha=6")),
    "8, 2 ranks": (2, ()),
}
both = pytest.mark.parametrize("sync", SENT)
merged_run = pytest.mark.parametrize("runs", ["merged"], indirect=True)
each_run = pytest.mark.parametrize("runs", SENT, indirect=True)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(folder of 3 uninterrupted iterations, folder of a run that was killed after step 1 and resumed), with
    the parameter in `model.lora.sync`."""
    root = tmp_path_factory.mktemp(request.param)
    config, straight = small_run.write(root), root / "runs" / "straight"
    given = yaml.safe_load(config.read_text())
    given["model"]["lora"] = {"sync": request.param}
    config.write_text(yaml.safe_dump(given))
    small_run.run("train", config, "run.name=straight", *LORA).succeeded()
    resumed = straight.with_name("resumed")
    small_run.train_until(resumed / "checkpoints" / "LATEST", config, "run.name=resumed", *LORA)
    again = ("run.name=resumed", "update.offload=all", *LORA, "--resume")
    done = small_run.run("train", config, *again).succeeded()
    assert "megatron-stppo: resumed from step_" in done.stderr
    return straight, resumed


def agrees(run: Path) -> None:
    """Fail unless the engine's log-probs are the trainer's, and the actor is updated."""
    for row in rows(run)[1:]:  # the first is the evaluation before training
        assert row["actor/first_kl_to_old"] == 0, "ratios that are not exactly 1"
        assert row["mismatch/mean_abs"] < 1e-6
        assert row["actor/gradient_norm"] > 0 and not row["actor/held"]


@each_run
def test_the_engine_serves_what_the_trainer_computes_with_adapters(runs: tuple[Path, Path]) -> None:
    agrees(runs[0])


@each_run
def test_a_resumed_run_with_adapters_has_the_bits_of_a_whole_one(runs: tuple[Path, Path]) -> None:
    straight, resumed = map(rows, runs)
    assert resumed == straight and len(straight) == 4
    whole, cut = (small_run.tensors(run, 3) for run in runs)
    assert cut == whole
    weights = (runs[0].parents[1] / "model" / "model.safetensors").stat().st_size
    state = json.loads((runs[0] / "checkpoints/step_3/state.json").read_text())
    assert state["lora"]["rank"] == 4 and len(state["lora"]["trunk"]) == 64
    assert sum(file["bytes"] for name, file in whole.items() if name.startswith("actor")) < weights


def scored(run: Path, iteration: int) -> tuple[list[list[int]], Tensor, Tensor]:
    """Return (tokens of each episode, the positions of their actions among all tokens, the trainer's
    log-probs of these)."""
    dump = load_file(run / f"dumps/iteration-{iteration:05d}" / "stage-0.safetensors")
    ends = dump["sequence_offsets"].tolist()
    episodes = [dump["tokens_P"][a:b].tolist() for a, b in pairwise(ends)]
    return episodes, dump["action_index_T"], dump["old_logprob_T"]


def logprobs(model: Any, episodes: list[list[int]], action_index_T: Tensor) -> Tensor:
    """Return the log-probs of the actions by a model of transformers."""
    every = [torch.cat([torch.zeros(1), reference_logprobs(model, tuple(ids))]) for ids in episodes]
    return torch.cat(every)[action_index_T]


def convert(run: Path, kind: str, checkpoint: str) -> Path:
    """Convert a checkpoint in one process, and return the folder."""
    output = run.parents[1] / f"{kind} {checkpoint}"
    given = [str(run.parents[1] / "config.yaml"), checkpoint, str(output), f"run.name={run.name}"]
    promises.start(["convert", kind, *given, *LORA, "parallel.tensor=1"])
    return output


@merged_run
def test_the_exported_merged_model_has_the_log_probs_of_the_trainer(runs: tuple[Path, Path]) -> None:
    episodes, action_index_T, trainer_T = scored(runs[0], 3)
    exported, base = convert(runs[0], "to-hf", "step_2"), runs[0].parents[1] / "model"
    assert load_file(exported / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    difference = [
        (
            logprobs(Qwen3ForCausalLM.from_pretrained(folder).eval(), episodes, action_index_T) - trainer_T
        ).abs()
        for folder in (exported, base)
    ]
    assert difference[0].max() < ROUNDING < 100 * ROUNDING < difference[1].max()


@merged_run
def test_adapters_in_the_format_of_peft_give_the_log_probs_of_the_trainer_when_merged_by_hand(
    runs: tuple[Path, Path],
) -> None:
    episodes, action_index_T, trainer_T = scored(runs[0], 3)
    adapters, base = convert(runs[0], "to-peft", "step_2"), runs[0].parents[1] / "model"
    settings = json.loads((adapters / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["task_type"]) == (4, 32, "CAUSAL_LM")
    assert Path(settings["base_model_name_or_path"]) == base
    model = Qwen3ForCausalLM.from_pretrained(base).eval()
    tensors = load_file(adapters / "adapter_model.safetensors")
    linears = [
        f"base_model.model.{name}"
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in settings["target_modules"] and isinstance(module, torch.nn.Linear)
    ]
    assert {f"{name}.lora_{matrix}.weight" for name in linears for matrix in "AB"} == tensors.keys()
    for name in linears:
        weight = model.get_submodule(name.removeprefix("base_model.model.")).weight
        a, b = (tensors[f"{name}.lora_{matrix}.weight"] for matrix in "AB")
        weight.data += settings["lora_alpha"] / settings["r"] * b @ a
    assert (logprobs(model, episodes, action_index_T) - trainer_T).abs().max() < ROUNDING


@each_run
def test_replayed_rollouts_give_the_same_adapters_bitwise(runs: tuple[Path, Path]) -> None:
    small_run.run("replay", runs[0], "run.name=replayed").succeeded()
    replayed = runs[0].with_name("replayed")
    expected = [
        {name: value for name, value in row.items() if not name.startswith("evaluate/")}
        for row in rows(runs[0])[1:]
    ]
    assert rows(replayed) == expected
    assert promises.weights(replayed, 3) == promises.weights(runs[0], 3) != promises.weights(runs[0], 2)


@each_run
def test_every_log_prob_is_that_of_the_adapters_that_its_token_names(runs: tuple[Path, Path]) -> None:
    said = promises.start(["audit", str(runs[0]), "parallel.tensor=1"])
    assert "passed; " in said and "not audited" not in said


@both
def test_replicas_at_bound_0_train_the_adapters_of_the_colocated_run(
    sync: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = small_run.write(tmp_path_factory.mktemp("served"))
    given = (*LORA, "parallel.tensor=1", "environment.kind=tests.replicas.late_tools:factory")
    given += (f"model.lora.sync={sync}",)
    for name, more in (("colocated", ()), ("served", (*promises.SERVED, "serving.max_staleness=0"))):
        promises.start(["train", str(config), f"run.name={name}", *given, *more])
    colocated, served = (config.parent / "runs" / name for name in ("colocated", "served"))
    assert promises.rows(served) == promises.rows(colocated)
    assert not any(row["actor/held"] for row in promises.rows(served)[1:]), "the actor must be updated"
    assert all(promises.trajectories(served, n) == promises.trajectories(colocated, n) for n in range(1, 4))
    assert promises.weights(served, 3) == promises.weights(colocated, 3) != promises.weights(served, 2)
    sent = [row["serving/weights_sent_mb"] for row in rows(served)[2:]]
    assert sent == [pytest.approx(SENT[sync])] * 2


@both
@pytest.mark.parametrize("case", ROUNDED)
def test_in_bfloat16_first_ratios_are_1_and_the_mismatch_is_that_of_rounding(
    case: str, sync: str, tmp_path: Path
) -> None:
    ranks, given = ROUNDED[case]
    config, run = small_run.write(tmp_path), tmp_path / "runs" / "rounded"
    given = (*LORA, *given, "model.dtype=bfloat16", f"model.lora.sync={sync}")
    small_run.run_command(("train", str(config), "run.name=rounded", *given), ranks=ranks).succeeded()
    for row in rows(run)[1:]:
        assert row["actor/first_kl_to_old"] == 0 and not row["actor/held"]
        assert 0 < row["mismatch/mean_abs"] < 0.03, "nats; 0.01 or less was measured"
    said = promises.start(["audit", str(run), "parallel.tensor=1"])
    assert "passed; " in said
