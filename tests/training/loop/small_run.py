"""A run of the real program that takes seconds: random tiny model, seven facts, real retrieval."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from megatron_stppo.cluster.launch.process import free_port
from megatron_stppo.environments.retrieval import BM25Retriever
from tests.forking import stand_in
from tests.rollout.vllm.tiny import build_model

# Every run has these variables; no run may write their values anywhere.
SECRETS = {"RETRIEVER_TOKEN": "planted-a41f97c05e", "WANDB_API_KEY": "planted-77d20be6d3"}
ROOT = Path(__file__).parents[3]  # where environment.kind finds modules of the tests
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | SECRETS
CAPITALS = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Accra", "Quito")


def write(root: Path) -> Path:
    """Write a model, one with experts, an index, tasks and a configuration under `root`.

    Return the configuration's path.
    """
    build_model(root / "model")
    build_model(root / "experts", "qwen3_moe")
    corpus = [
        {"id": str(i), "contents": f'"{name}"\n{name} is a capital.'} for i, name in enumerate(CAPITALS)
    ]
    BM25Retriever.build(corpus, root / "index")
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": f"Which city is number {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [name]}},
            "extra_info": {"split": "train", "index": i},
        }
        for i, name in enumerate(CAPITALS)
    ]
    (root / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"name": "small", "root": str(root / "runs"), "iterations": 6, "checkpoint_every": 3},
        "model": {"path": str(root / "model")},
        "parallel": {"tensor": 2},
        "data": {"train": str(root / "tasks.jsonl"), "evaluate": str(root / "tasks.jsonl")},
        "environment": {
            "kind": "tests.training.loop.searching:factory",  # rewards vary, or there would be no updates
            "tool_wait": 0,  # only the phases have deadlines
            "max_turns": 1,
            "max_observation_tokens": 24,
            "retrieval": {"index": str(root / "index"), "topk": 1},
        },
        "rollout": {
            "tasks_per_iteration": 4,
            "max_turn_tokens": 8,
            "max_prompt_tokens": 64,
            "kv_cache_gib": 0.05,
            "overlap_tools": False,
        },
        "update": {"minibatches": 2, "epochs": 2, "actor": {"lr": 1e-3}, "critic": {"lr": 1e-3}},
        "algorithm": {"whiten": False, "kl_coefficient": 0.01},
    }
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Listener(NamedTuple):
    """Example: Listener("agent", "::", 29500). The owner is "agent" for torchrun, "rank" for its children."""

    owner: str
    address: str
    port: int


class Listening:
    """A thread that collects the listening sockets of a process and of all its descendants while it lives.

    Example: with Listening(pid) as listening: ...; then listening.found has every listener that was seen.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.found: set[Listener] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Listening:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        # a child that was sampled before its exec has the agent's sockets
        agents = {listener[1:] for listener in self.found if listener.owner == "agent"}
        self.found -= {Listener("rank", *place) for place in agents}

    def _run(self) -> None:
        while not self._ended.wait(0.2):  # seconds; a listener of this program lives for its whole run
            try:
                processes = [("agent", self._root)]
                processes += [("rank", child) for child in self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for owner, process in processes:
                self._look(owner, process)

    def _look(self, owner: str, process: psutil.Process) -> None:
        try:
            sockets = process.net_connections("inet")
        except psutil.NoSuchProcess:  # it ended between the two calls
            return
        for opened in sockets:
            if opened.status == psutil.CONN_LISTEN:
                self.found.add(Listener(owner, opened.laddr.ip, opened.laddr.port))


@dataclass(frozen=True)
class Done:
    """Result of a command that has ended, with every address on which it listened."""

    returncode: int
    stdout: str
    stderr: str
    listeners: frozenset[Listener]

    def succeeded(self) -> Done:
        """Return this result, and fail unless the command ended with 0."""
        assert self.returncode == 0, self.stderr[-3000:]
        return self


def tensors(run: Path, step: int) -> dict[str, Any]:
    """Return {file: hash and size} of the weights and optimizer states in a checkpoint of a run."""
    files = json.loads((run / f"checkpoints/step_{step}/MANIFEST.json").read_text())["files"]
    found = {name: entry for name, entry in files.items() if name.endswith(".distcp")}
    assert {name.split("/")[0] for name in found} == {"actor", "critic"}
    return found


def torchrun(ranks: int = 2, python: str = "") -> list[str]:
    """Return the words that start the program on `ranks` ranks. python: by default, that of tests/forking."""
    launcher = [python or stand_in.python(), "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", "-m", "megatron_stppo"]


def run(command: str, config: Path, *arguments: str, python: str = "", ranks: int = 2) -> Done:
    return run_command((command, str(config), *arguments), ranks, python)


def train_until(path: Path, config: Path, *arguments: str) -> None:
    """Train, and kill all ranks at once and without warning as soon as `path` exists."""
    command, nothing = [*torchrun(), "train", str(config), *arguments], subprocess.DEVNULL
    with subprocess.Popen(command, stdout=nothing, stderr=nothing, env=ENVIRONMENT) as process:
        deadline = time.monotonic() + 240
        while not path.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        started = [*psutil.Process(process.pid).children(recursive=True), *stand_in.processes()]
        for one in (process, *started):
            one.kill()
        while any(map(_runs, started)):
            time.sleep(0.05)
    assert path.exists()


def _runs(process: psutil.Process) -> bool:
    """Return False for a process that has ended, also if nobody has asked for its exit status yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_command(arguments: tuple[str, ...], ranks: int = 2, python: str = "") -> Done:
    """Run a command as a user starts it: under torchrun for ranks > 1."""
    program = torchrun(ranks, python) if ranks > 1 else [python or stand_in.python(), "-m", "megatron_stppo"]
    with (
        subprocess.Popen(
            [*program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        ) as process,
        Listening(process.pid) as listening,
    ):
        try:
            out, err = process.communicate(timeout=240)
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
    return Done(process.returncode, out, err, frozenset(listening.found))


@contextmanager
def retriever(root: Path) -> Iterator[tuple[str, ...]]:
    """Run the retrieval server on the index. Yield the overrides with which a run uses it, with a token."""
    port = free_port()
    script = ROOT / "examples" / "search_agent" / "serve_retriever.py"
    command = [sys.executable, str(script), str(root / "index")]
    command += ["--port", port, "--token-env", "RETRIEVER_TOKEN"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as process:
        try:
            deadline = time.monotonic() + 60
            while not _answers(port):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            values = ("kind=http", f"url=http://127.0.0.1:{port}/retrieve", "token_env=RETRIEVER_TOKEN")
            yield tuple(f"environment.retrieval.{value}" for value in values)
        finally:
            process.terminate()


def _answers(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0
