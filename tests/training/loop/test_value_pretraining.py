"""The way of a critic through the real program: episodes are recorded, it learns their returns, a run begins
with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests.training.loop import small_run

PLAIN = ("algorithm.kl_coefficient=0", "parallel.tensor=1")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose model has played two iterations, in runs/played."""
    path = small_run.write(tmp_path_factory.mktemp("critic"))
    small_run.run("rollout", path, "run.name=played", "run.iterations=2", *PLAIN, ranks=1).succeeded()
    return path


def pretrain(config: Path, *arguments: str, ranks: int = 2) -> small_run.Done:
    given = ("--critic", f"{config.parent}/runs/played", f"cold_start.output={config.parent}/critic")
    more = ("cold_start.critic_steps=12", *PLAIN, *arguments)
    return small_run.run("cold-start", config, *given, *more, ranks=ranks)


def explained(folder: Path, played: list[dict]) -> float:
    """Return the explained variance of the returns by a critic's folder, with transformers in float64."""
    critic = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64)
    values: list[float] = []
    returns: list[float] = []
    for row in played:
        ids, rewards = [*row["prompt_ids"]], [turn["reward"] for turn in row["turns"]]
        at: list[int] = []
        for number, turn in enumerate(row["turns"]):
            at += range(len(ids) - 1, len(ids) - 1 + len(turn["token_ids"]))
            returns += [sum(rewards[number:])] * len(turn["token_ids"])
            ids += [*turn["token_ids"], *turn["observation_ids"]]
        with torch.no_grad():
            values += critic(torch.tensor([ids])).logits[0, at, 0].tolist()
    target = torch.tensor(returns)
    return float(1 - (target - torch.tensor(values)).var() / target.var())


def test_a_run_begins_with_the_critic_and_the_policy_is_untouched(config: Path) -> None:
    root = config.parent
    policy = (root / "model" / "model.safetensors").read_bytes()
    done = pretrain(config, "update.critic.lr=3e-3").succeeded()
    assert (root / "model" / "model.safetensors").read_bytes() == policy
    lines = re.findall(r"critic \d+/12: loss (.*), explained variance (.*) before the step(.*)", done.stderr)
    assert len(lines) == 12 and lines[0][1] == "0.000", "its value head is 0 at first"
    assert [number for number, line in enumerate(lines, 1) if line[2]] == [10, 12]
    (last,) = re.findall(r"done; held-out explained variance ([-.0-9]+)", done.stderr)
    assert lines[-1][2] == f", {last} held out after it"
    assert ("worse than the mean return" in done.stderr) == (float(last) < 0)

    given = ("run.name=taught", "run.iterations=1", f"model.critic_path={root}/critic")
    small_run.run("train", config, *given, *PLAIN, ranks=1).succeeded()
    run = root / "runs" / "taught"
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = (run / "trajectories" / "iteration-00001.jsonl").read_text().splitlines()
    expected = explained(root / "critic", [json.loads(line) for line in lines])
    assert abs(expected) > 1e-3
    assert row["critic/explained_variance"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_episodes_of_another_model_are_refused_in_one_line_and_nothing_is_written(config: Path) -> None:
    other = f"cold_start.output={config.parent}/other"
    done = pretrain(config, "rollout.temperature=0.3", other, ranks=1)
    assert done.returncode != 0
    assert re.search(
        r"megatron-stppo: --critic=.*/played: the log-probs of its episodes differ from those of model\.path="
        r".*/model by [.0-9]+ nats per token, rollout\.max_mismatch=0\.1: another model, tokenizer or "
        r"rollout\.temperature played them; record episodes with `rollout`",
        done.stderr,
    ), done.stderr[-3000:]
    assert not (config.parent / "other").exists()
