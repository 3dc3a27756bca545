"""The folder of a run belongs to one run, and to one process at a time. Tests start the real program."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_stppo.config.file import load
from megatron_stppo.data.text.tokenizer_files import chat_templates
from tests.forking import stand_in
from tests.training.loop import small_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.write(tmp_path_factory.mktemp("folder"))


def train(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Train on one rank until it ends. The engine does not start if the folder is refused."""
    line = command(config, *arguments)
    return subprocess.run(line, capture_output=True, text=True, env=small_run.ENVIRONMENT, timeout=240)


def command(config: Path, *arguments: str, python: str = "") -> list[str]:
    one_rank = ("parallel.tensor=1", *arguments)
    return [python or stand_in.python(), "-m", "megatron_stppo", "train", str(config), *one_rank]


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_name_is_not_reused(config: Path) -> None:
    run = config.parent / "runs" / "held"
    (run / "trajectories").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: held}\n")
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n')
    before = files(config.parent)
    again = train(config, "run.name=held")
    assert (again.returncode, again.stderr) == (
        2,
        f"megatron-stppo: run.name=held: {run} holds metrics.jsonl; give --resume to continue that run, or "
        "another run.name\n",
    )
    assert files(config.parent) == before


def test_two_trainings_of_one_name_do_not_run_at_the_same_time(config: Path) -> None:
    """A forked process would not have the process id of its stand-in."""
    lock = config.parent / "runs" / "shared" / "lock"
    with started(config, "run.name=shared", python=sys.executable) as first:
        wait_for_holder(lock, first)
        second = train(config, "run.name=shared")
        assert (second.returncode, second.stderr) == (
            2,
            f"megatron-stppo: run.name=shared: {lock.parent} is in use by process {first.pid} on "
            f"{socket.gethostname()}; wait until it ends, or give another run.name\n",
        )


def test_ctrl_c_writes_a_checkpoint_and_a_resumed_run_reports_its_changes(config: Path) -> None:
    """A resume with other models is refused before anything is written; one with another rate is accepted."""
    run = config.parent / "runs" / "interrupted"
    name = ("run.name=interrupted", "run.checkpoint_every=99", "update.critic.warmup_fraction=0")
    with started(config, *name, "run.iterations=99") as first:
        wait_until((run / "trajectories" / "iteration-00001.jsonl").exists, first)
        first.send_signal(signal.SIGINT)
        assert first.wait(240) == 85
    (step,) = (run / "checkpoints").glob("step_*")
    done = int(step.name.removeprefix("step_"))
    assert json.loads((run / "exit.json").read_text()) == {
        "code": 85,
        "reason": f"{step.name} of 99 is checkpointed and can be resumed: SIGINT",
    }
    state = json.loads((step / "state.json").read_text())
    assert state["trainers"]["actor"][-1] == 99, "the iterations that the warm-up is a share of"
    before = files(run)
    for other, said in (
        (f"model.path={config.parent / 'experts'}", "its experts=4, that of"),
        (f"model.path={retold(config.parent / 'model')}", "its chat template differs from that of"),
        ("algorithm.preset=grpo algorithm.whiten=true", "algorithm.advantage=group: trains no critic"),
    ):
        refused = train(config, *name, "--resume", *other.split(), "rollout.samples_per_task=2")
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
        assert said in refused.stderr
    assert files(run) == before
    refused = train(config, *name, "--resume", f"model.path={sharpened(config.parent / 'model')}")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith(
        f"megatron-stppo: model.path={config.parent / 'sharpened'}: holds other weights than "
    )
    changed = (f"run.iterations={done + 1}", "update.actor.lr=0.002", "update.critic.lr=0.003")
    resumed = train(config, *name, *changed, "--resume")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert [line for line in resumed.stderr.splitlines() if " changes " in line] == [
        f"megatron-stppo: --resume changes run.iterations: 99 -> {done + 1}",
        "megatron-stppo: --resume changes update.actor.lr: 0.001 -> 0.002",
        "megatron-stppo: --resume changes update.critic.lr: 0.001 -> 0.003",
    ]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["critic/lr"] for row in rows[-2:]] == [0.001, 0.003]
    assert 0 < rows[-1]["actor/lr"] < 0.002, "still warming up"
    of_attempts = [load(run / "configs" / f"attempt-{n}.yaml") for n in (1, 2)]
    assert [config.update.actor.lr for config in of_attempts] == [0.001, 0.002]
    assert (run / "config.yaml").read_text() == (run / "configs" / "attempt-2.yaml").read_text()
    moved = train(run.rename(run.with_name("moved")) / "config.yaml", "--resume")
    assert moved.returncode == 0 and f": step_{done + 1} is done" in moved.stderr
    assert "megatron-stppo: --resume changes run.name: interrupted -> moved" in moved.stderr
    assert not run.exists()


def retold(model: Path) -> Path:
    """Return a copy of a model with another chat template."""
    other = shutil.copytree(model, model.with_name("retold"))
    (other / "chat_template.jinja").write_text(chat_templates(model)["default"] + "{# #}")
    return other


def sharpened(model: Path) -> Path:
    """Return a copy of a model with one other tensor: of the same shape, so that it can be loaded."""
    other = model.with_name("sharpened")
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return other


@contextmanager
def started(config: Path, *arguments: str, python: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Start a training, and kill it at the end of the block."""
    # A shell starts background jobs with SIGINT ignored, and a run keeps this; tests may run in such a job.
    line = ["env", "--default-signal=INT", *command(config, *arguments, python=python)]
    with subprocess.Popen(line, stderr=subprocess.DEVNULL, env=small_run.ENVIRONMENT) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_holder(lock: Path, process: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: lock.exists() and f'"process": {process.pid},' in lock.read_text(), process)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
