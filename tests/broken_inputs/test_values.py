"""Values of fields and options that cannot be used: exit code 2 and one line with field, value and remedy.

They are all detected before torch is imported. A scheduler would requeue a crash (exit code 1) again and
again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stppo import __main__ as command_line
from megatron_stppo.replicas.wire import keys
from tests.broken_inputs.inputs import Said
from tests.validation.test_run_folder import write_step


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("run.seed=-1", "run.seed=-1: Input should be greater than or equal to 0"),
        ("run.seed=4294967296", "run.seed=4294967296: Input should be less than 4294967296"),
        ("update.actor.betas=[1.5,0.9]", "update.actor.betas.0=1.5: Input should be less than 1"),
        (
            "update.critic.betas=[0.9,-0.1]",
            "update.critic.betas.1=-0.1: Input should be greater than or equal to 0",
        ),
        ("rollout.max_context=0", "rollout.max_context=0: Input should be greater than or equal to 2"),
        (
            "rollout.max_context=10",
            "rollout.max_context=10 is less than rollout.max_prompt_tokens=64 + rollout.max_turn_tokens=8; "
            "raise it to 72 or more, or lower these two",
        ),
        (
            "rollout.max_turn_tokens=500",
            "rollout.max_prompt_tokens=64 + (environment.max_turns=1 + 1) * (rollout.max_turn_tokens=500 + "
            "environment.max_observation_tokens=24) = 1112 exceeds the model's max_position_embeddings=256; "
            "lower one of these fields, or set rollout.max_context=256",
        ),
        ("serving.replicas=0", "serving: replicas=0 is below 1; give null if the trainer's ranks serve"),
        ("serving.max_staleness=-1", "serving.max_staleness=-1: Input should be greater than or equal to 0"),
        (
            "serving={order: completion, max_staleness: 0}",
            "serving: order='completion' with max_staleness=0: every admitted episode is in the next batch, "
            "so there is only one order; choose 'admission', or max_staleness=1 or more",
        ),
    ],
)
def test_a_number_out_of_its_bounds_is_refused(root: Path, said: Said, override: str, line: str) -> None:
    assert said("train", root / "run.yaml", override) == line


@pytest.mark.parametrize("command", ["train", "rollout", "evaluate"])
@pytest.mark.parametrize("where", ["tasks.jsonl", "tasks.jsonl/deeper"])
def test_a_run_folder_that_cannot_be_written_is_refused(
    root: Path, said: Said, command: str, where: str
) -> None:
    message = said(command, root / "run.yaml", f"run.root={root / where}")
    assert message == (
        f"run.root={root / where}/r: cannot be written, {root}/tasks.jsonl is not a folder; name a folder "
        "that you may write to"
    )


def test_an_output_that_cannot_be_written_is_refused_before_the_evaluation(root: Path, said: Said) -> None:
    message = said("evaluate", root / "run.yaml", "--output", root / "tasks.jsonl" / "result.json")
    assert message.startswith(f"--output={root}/tasks.jsonl: cannot be written, ")


def test_a_cold_start_replaces_nothing(root: Path, said: Said) -> None:
    (root / "scripts.jsonl").write_text("{}\n")
    (root / "photos").mkdir()
    (root / "photos" / "cat.png").write_text("")
    command = ("cold-start", root / "run.yaml", f"data.demonstrations={root}/scripts.jsonl")
    assert said(*command, f"cold_start.output={root}/photos") == (
        f"cold_start.output={root}/photos: already exists; name a new folder, or remove it"
    )
    assert "is model.path; name another folder" in said(*command, f"cold_start.output={root}/model")
    assert "is not a folder" in said(*command, f"cold_start.output={root}/tasks.jsonl")


def test_a_rollout_with_nothing_left_to_play_is_refused(root: Path, said: Said) -> None:
    for step in (3, 4):
        (root / "runs" / "other" / "checkpoints" / f"step_{step}").mkdir(parents=True)
    command = ("rollout", root / "run.yaml", "--from", root / "runs" / "other")
    assert said(*command, "run.iterations=4").startswith(
        f"run.iterations=4: --start=latest of {root}/runs/other has finished 4 iterations, so nothing is "
        "left to play; give run.iterations=5 or more"
    )
    assert "--start=step_3" in said(*command, "--start", "step_3", "run.iterations=2")


def test_a_run_in_progress_is_not_trained_by_a_second_process(root: Path, said: Said) -> None:
    folder = root / "runs" / "r"
    folder.mkdir(parents=True)
    code = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX)"
    command = [sys.executable, "-c", f"{code}; print(flush=True); sys.stdin.read()", str(folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        message = said("train", root / "run.yaml", "serving.replicas=1")
    assert message == (
        f"run.name=r: {folder} is in use by another process; wait until it ends, or give another run.name"
    )


def test_a_finished_run_is_resumed_without_starting_anything(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = root / "runs" / "r"
    write_step(folder / "checkpoints", 4)
    left_by_a_killed_trainer = keys.path_of(folder)
    left_by_a_killed_trainer.parent.mkdir()
    left_by_a_killed_trainer.touch()
    arguments = ("train", str(root / "run.yaml"), "--resume", "run.iterations=4", "serving.replicas=1")
    monkeypatch.setattr(sys, "argv", ["megatron-stppo", *arguments])
    assert command_line.run() == 0
    assert json.loads((folder / "exit.json").read_text()) == {"code": 0, "reason": "done"}
    said = capsys.readouterr().err
    done = "run.iterations=4: step_4 is done, so nothing was trained; give more to continue the run"
    assert f"megatron-stppo: {done}\n" in said
    assert "importing" not in said and not list((folder / "serving").iterdir())


LISTENERS = {
    "serving.address": ("serving.replicas=1",),
    "environment.agents_address": ("environment.kind=agent", "environment.command=[echo]"),
}


@pytest.mark.parametrize("field", LISTENERS)
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("192.0.2.1", "cannot listen on 192.0.2.1 (Cannot assign requested address); give the address of a"),
        ("0.0.0.0", "means every interface of this machine; give the address of the one that {}"),
        ("no such host", "is not known ("),
    ],
)
def test_an_address_that_is_not_one_of_this_machine_is_refused(
    root: Path, said: Said, field: str, address: str, why: str
) -> None:
    message = said("train", root / "run.yaml", *LISTENERS[field], f"{field}={address}")
    assert message.startswith(
        f"{field}={address}: {why.format('replicas' if 'serving' in field else 'agents')}"
    )
    assert not (root / "runs").exists()


def test_under_torchrun_the_reason_is_the_last_thing_printed(root: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "megatron_stppo", "train", str(root / "run.yaml"), "update.epoch=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    last = [line for line in done.stderr.splitlines() if line.strip()][-2:]
    assert "megatron-stppo: update.epoch=2: no such field; did you mean update.epochs?" in last[0]
    assert not last[1].strip("="), "the frame of torchrun's report"


def test_log_probs_of_nucleus_sampling_are_not_audited(root: Path, said: Said) -> None:
    run = root / "runs" / "first"
    (run / "trajectories").mkdir(parents=True)
    config = (root / "run.yaml").read_text()
    (run / "config.yaml").write_text(config)
    assert said("audit", run).endswith("trajectories/ holds no iteration to audit; choose another run")
    (run / "trajectories" / "iteration-00001.jsonl").touch()
    (run / "config.yaml").write_text(config.replace("rollout:\n", "rollout:\n  top_p: 0.5\n"))
    assert said("audit", run).startswith("rollout.top_p=0.5: the engine's log-probs are of the tokens")
