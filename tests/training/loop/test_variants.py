"""One real iteration under various layouts and algorithms, then the other commands on its results."""

from __future__ import annotations

import base64
import json
import math
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3ForCausalLM

from tests import orders
from tests.documented import undocumented, unreported
from tests.forking import stand_in
from tests.ranks import run_ranks
from tests.training.loop import canaries, small_run

# {name: overrides}. The engine's layout differs from the training layout; critic, reference and experts vary.
CASES = {
    "pipeline_to_tensor_so_grpo": (
        "model.path={root}/experts",
        "algorithm.routing_replay=old_policy",
        "parallel.tensor=1",
        "parallel.pipeline=2",
        "rollout.engine_tensor=2",
        "algorithm.preset=so_grpo",
        "algorithm.advantage=gigpo",
        "algorithm.whiten=true",
        "algorithm.overlong_from=3",
        "algorithm.overlong_to=9",
        "algorithm.aggregation=sequence_mean_token_sum",
        "model.recompute=selective",
        "rollout.samples_per_task=2",
        "rollout.resample=1",
        "algorithm.kl_coefficient=0",
        "run.dump=all",
    ),
    "tensor_to_replicas_s_ppo": (
        "rollout.engine_tensor=1",
        "algorithm.preset=s_ppo",
        "algorithm.correction=gradient",
        "algorithm.kl_in=loss",
        "algorithm.kl_estimator=k3",
        "algorithm.aggregation=turn_mean",
        "algorithm.mismatch=truncate",
        "algorithm.gae_observations=true",
        "parallel.sequence=true",
        "model.recompute=full",
        "update.tokens_per_microbatch=80",
        "update.logit_rows=6",
        "run.evaluate_every=1",
    ),
}

OF_GROUPS = ("without_variance", "resampled", "played_per_trained", "reward_all")
STARTED = "tensor_to_replicas_s_ppo"  # by torchrun and Python themselves; the others are forked


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.write(tmp_path_factory.mktemp("variants"))


@pytest.fixture(scope="module")
def finished() -> dict[str, small_run.Done]:
    """The results of the first test's runs, by name."""
    return {}


@pytest.mark.parametrize("name", CASES)
def test_an_iteration_runs_and_engine_and_trainer_agree(
    config: Path,
    finished: dict[str, small_run.Done],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(small_run.ENVIRONMENT, orders.FOLDER, str(tmp_path / "orders"))
    overrides = [override.format(root=config.parent) for override in CASES[name]]
    python = sys.executable if name == STARTED else ""
    with small_run.retriever(config.parent) as asked:
        given = (f"run.name={name}", "run.iterations=1", *overrides, *asked)
        done = small_run.run("train", config, *given, python=python)
    finished[name] = done
    assert done.returncode == 0, done.stderr[-3000:]
    assert name == STARTED or orders.findings(tmp_path / "orders") == []
    folder = config.parent / "runs" / name
    for part in ("importing", "engine", "models", "first reshard"):
        assert len(re.findall(rf"^megatron-stppo: {part} \d+\.\d s$", done.stderr, re.MULTILINE)) == 1, part
    assert f"megatron-stppo: the report is {folder}/report.html\n" in done.stderr
    vocab = json.loads((config.parent / "model" / "config.json").read_text())["vocab_size"]
    rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    printed = [x for x in done.stderr.splitlines() if re.match(r"(s_ppo|so_grpo) \d/1: ", x)]
    assert len(printed) == len(rows)
    reward = f"{last['reward/mean']:.3f} ± {last['reward/standard_error']:.2g}"
    assert f"1/1: reward {reward}, exact match " in printed[-1] and ", failed 0, " in printed[-1]
    assert last["mismatch/mean_abs"] < 1e-5
    assert last["rollout/action_tokens"] > 0
    assert last["actor/skipped"] == 0
    # all prompts begin alike, but a micro-batch of 80 tokens has one trajectory
    assert last["update/distinct_share"] == 1 if "s_ppo" in name else last["update/distinct_share"] < 0.8
    assert last["actor/first_kl_to_old"] == 0, "every ratio of the first minibatch is exactly 1"
    assert " layers; prefixes shared; " in done.stderr
    assert "; ops in csrc" in done.stderr, "training uses the kernels by default"
    assert ("critic/loss" in last) == ("s_ppo" in name)
    assert (folder / "checkpoints" / "step_1" / "critic").exists() == ("s_ppo" in name)
    assert last["rollout/staleness_max"] == 0
    assert 0 < last["actor/entropy"] <= math.log(vocab), "per token, also where the loss is a sum over tokens"
    assert not undocumented(last)
    assert {f"rollout/{name}" in last for name in OF_GROUPS} == {"s_ppo" not in name}
    if "s_ppo" in name:  # with critic, reference, evaluation and the exact norm of C
        rare = {"gpu", "mfu", "serving", "fault/rolled_back_to", "seconds", "share", "environment"}
        rare.add(
            "evaluate/environment/NAME"
        )  # tests/commands/test_new_project.py has an environment with metrics
        rare |= {f"rollout/{name}" for name in OF_GROUPS}
        left = [metric for metric in unreported(last) if not {metric, metric.partition("/")[0]} & rare]
        assert not left
    assert ("evaluate/exact_match" in last) == ("s_ppo" in name)


@pytest.mark.long
def test_the_routes_of_a_dumped_batch_return_to_their_stages(config: Path) -> None:
    """Needs the run of pipeline_to_tensor_so_grpo; other experts would give other numbers."""
    name = "pipeline_to_tensor_so_grpo"
    source = config.parent / "runs" / name
    assert len(list(source.glob("dumps/iteration-00001/stage-*.safetensors"))) == 2
    given = ("run.name=routed", "run.iterations=1", "--records", "batches")
    small_run.run("replay", source, *given).succeeded()
    (expected,), (row,) = (
        [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (source, config.parent / "runs" / "routed")
    )
    for key in (key for key in expected if key.startswith("actor/")):
        assert row[key] == expected[key], key


def test_a_checkpoint_is_evaluated_and_converted(config: Path) -> None:
    """Needs the run of tensor_to_replicas_s_ppo."""
    name = "tensor_to_replicas_s_ppo"
    runs, overrides = config.parent / "runs", (f"run.name={name}", *CASES[name])
    result = config.parent / "result.json"
    small_run.run(
        "evaluate", config, "--checkpoint", "latest", "--output", str(result), *overrides
    ).succeeded()
    rows = [json.loads(x) for x in (runs / name / "metrics.jsonl").read_text().splitlines()]
    alone, during = json.loads(result.read_text()), rows[-1]
    assert alone.pop("evaluate/tokens_per_second") > 0
    assert alone.pop("checkpoint") == str(runs / name / "checkpoints" / f"step_{during['iteration']}")
    assert alone.pop("model") == str(config.parent / "model")
    assert alone == {name: during[name] for name in alone}
    assert {"evaluate/exact_match", "evaluate/episodes"} <= alone.keys()
    assert alone["evaluate/overlong_prompts"] == 0

    hf = config.parent / "hf"
    small_run.run_command(("convert", "to-hf", str(config), "latest", str(hf), *overrides)).succeeded()
    before, after = (load_file(config.parent / f / "model.safetensors") for f in ("model", "hf"))
    assert before.keys() == after.keys()
    moved = max(float((after[k] - before[k]).abs().max()) for k in after)
    assert 0 < moved <= 1.01e-3 * 4, "four steps of Adam at lr 1e-3"


def test_a_checkpoint_of_two_ranks_is_converted_by_one_process_into_the_same_bytes(config: Path) -> None:
    """Needs the conversion by two ranks in the previous test."""
    run, hf = config.parent / "runs" / "tensor_to_replicas_s_ppo", config.parent / "hf_of_one"
    overrides = (f"run.name={run.name}", *CASES[run.name])
    convert = [stand_in.python(), "-m", "megatron_stppo", "convert", "to-hf", str(config), "latest"]
    done = subprocess.run(
        [*convert, str(hf), *overrides],
        capture_output=True,
        text=True,
        env=small_run.ENVIRONMENT,
        timeout=120,
        umask=0o027,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(
        f"wrote {hf}: 0.1 M parameters, float32, 0.4 MB; actor of {run}/checkpoints"
    )
    assert {stat.S_IMODE(path.stat().st_mode) for path in hf.iterdir()} == {0o640}
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (hf / name).read_bytes() == (config.parent / "hf" / name).read_bytes(), name

    model = Qwen3ForCausalLM.from_pretrained(hf).eval()
    tokenizer = AutoTokenizer.from_pretrained(hf, trust_remote_code=False)
    weights = load_file(hf / "model.safetensors")
    assert all(
        torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items() if key in weights
    )
    assert set(model.state_dict()) - set(weights) == {"lm_head.weight"}, "tied to the embeddings"
    assert len(tokenizer) == model.config.vocab_size


def test_every_listener_of_a_run_is_on_the_loopback(finished: dict[str, small_run.Done]) -> None:
    """An exception are torchrun's stores, which always listen on every interface (SECURITY.md)."""
    done = finished[STARTED]
    ranks = {listener.address for listener in done.listeners if listener.owner == "rank"}
    assert ranks and ranks <= {"127.0.0.1", "::1"}, "gloo listens at least"
    assert sum(listener.owner == "agent" for listener in done.listeners) <= 2, "for agents, for ranks"


def test_no_secret_is_in_the_files_or_the_output_of_a_run(
    config: Path, finished: dict[str, small_run.Done]
) -> None:
    """The secrets are in the environment of the runs; one is the retriever's token."""
    left = [path for path in (config.parent / "runs").rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "rank-1.log", "state.json"} <= {path.name for path in left}
    said = [(done.stdout + done.stderr).encode() for done in finished.values()]
    for secret in small_run.SECRETS.values():
        for form in (secret.encode(), base64.b64encode(secret.encode())):
            assert not [path for path in left if form in path.read_bytes()]
            assert not [text for text in said if form in text]


def test_a_pickle_that_replaces_a_file_of_a_checkpoint_is_refused_unread(
    config: Path, tmp_path: Path
) -> None:
    """Needs the run of tensor_to_replicas_s_ppo."""
    folder = config.parent / "runs" / "tensor_to_replicas_s_ppo" / "checkpoints"
    (refused,) = run_ranks(canaries.plant, 1, folder, tmp_path)
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert refused == sorted(str(path) for path in files if path.name != "LATEST")
