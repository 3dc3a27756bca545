"""SmolLM2-135M-Instruct and the word problems of examples/smollm2: from the file to a trained agent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from gpu_checks import main
from megatron_stppo.cluster.launch import process

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/smollm2"
GPU = torch.cuda.is_available()
# (iterations, the one after which the run is stopped, iterations between evaluations, held-out problems)
ITERATIONS, STOPPED, EVALUATED, PROBLEMS = (60, 30, 20, 128) if GPU else (4, 2, 2, 8)
RESUMABLE = 85  # the exit code after a signal of the scheduler, docs/cluster.md
ROUNDING = 0.05 if GPU else 1e-4  # nats per token, mean: bfloat16 on a GPU, float32 on a CPU


def folder() -> Path:
    """Return the folder of the run, which stays after the checks."""
    return Path(os.environ.get("REAL_RUN") or ROOT / "runs/check-real")


def settings() -> list[str]:
    home = folder()
    own = [
        f"run.root={home.parent}",
        f"run.name={home.name}",
        f"run.iterations={ITERATIONS}",
        f"run.evaluate_every={EVALUATED}",
        f"run.checkpoint_every={EVALUATED}",
        f"model.path={home}/cold-start",
        f"data.train={home}/data/train.jsonl",
        f"data.evaluate={home}/data/evaluate.jsonl",
        f"data.demonstrations={home}/data/demonstrations.jsonl",
        f"cold_start.output={home}/cold-start",
    ]
    if not GPU:
        return [*own, "rollout.tasks_per_iteration=4"]
    # compiling vLLM's graphs takes longer than this run gains from them
    eager = ["rollout.gpu_memory_utilization=0.1", "rollout.vllm.enforce_eager=true"]
    # without this, vLLM measures the free memory, which other runs on this GPU change meanwhile
    eager += [f"rollout.vllm.kv_cache_memory_bytes={2**30}"]
    return [*own, *eager, "model.dtype=bfloat16", "update.tokens_per_microbatch=8192"]


def prepared() -> dict[str, Any]:
    """Import the model, write the problems, and teach the form of a call by the cold start."""
    home, began = folder(), time.monotonic()
    shutil.rmtree(home, ignore_errors=True)  # of an earlier check
    run([sys.executable, str(EXAMPLE / "build_problems.py"), "--output", str(home / "data")])
    held_out = home / "data/evaluate.jsonl"
    held_out.write_text(
        "".join(held_out.read_text(encoding="utf-8").splitlines(keepends=True)[:PROBLEMS]), encoding="utf-8"
    )
    built = time.monotonic()
    program("cold-start", f"model.path={home}/data/model")
    return {"seconds of import and problems": built - began, "of the cold start": time.monotonic() - built}


def reference() -> dict[str, Any]:
    """Compute the log-probs of some demonstrations with transformers in float32, for `agreement`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_stppo.data.demonstrations import read

    start = folder() / "cold-start"
    tokenizer = AutoTokenizer.from_pretrained(start, trust_remote_code=False)
    texts = [list(one.token_ids) for one in read(folder() / "data/demonstrations.jsonl", tokenizer, 1024)]
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, trust_remote_code=False)
    model.to("cuda" if GPU else "cpu")
    found = []
    with torch.no_grad():
        for ids in texts:
            ids_1T = torch.tensor([ids], device=model.device)
            logprob_TV = model(ids_1T).logits[0, :-1].log_softmax(-1)
            found.append(logprob_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].tolist())
    (folder() / "transformers.json").write_text(
        json.dumps({"texts": texts, "logprobs": found}), encoding="utf-8"
    )
    return {"texts": len(texts), "nats per token": -sum(map(sum, found)) / sum(map(len, found))}


def agreement() -> dict[str, Any]:
    """Compare the trainer's log-probs of the same texts."""
    process.prepare(engine=False)
    from megatron_stppo.base.types import Task, Trajectory, Turn
    from megatron_stppo.config.file import load
    from megatron_stppo.data.packing import to_batch
    from megatron_stppo.model.learner import build_learner
    from megatron_stppo.training.stages import divided, score
    from megatron_stppo.weights.sharding.hf_names import read_shape

    expected = json.loads((folder() / "transformers.json").read_text(encoding="utf-8"))
    task, played = Task("real", (), ("",), "train", 0), []
    for ids in expected["texts"]:
        size = len(ids) - 1
        turn = Turn(tuple(ids[1:]), (-1.0,) * size, (), 0.0, ((0, size),))
        played.append(Trajectory(task, (ids[0],), (turn,), "ok", group=len(played)))
    config = load(EXAMPLE / "config.yaml", [*settings(), "update.old_logprob=score"])
    mesh, shape = process.start(config), read_shape(config.model.path)
    learner = build_learner(config, shape, mesh, process.dtype(config))
    found_T = score(learner, divided(learner, to_batch(played), 0)).old_logprob_T
    assert found_T is not None
    apart_T = (found_T.cpu() - torch.tensor(list(chain.from_iterable(expected["logprobs"])))).abs()
    mean, most = float(apart_T.mean()), float(apart_T.max())
    if not mean < ROUNDING:  # NaN fails too
        raise AssertionError(f"log-probs differ from transformers' by {mean} nats on average, {most} at most")
    return {"tokens": len(apart_T), "difference, nats per token": mean, "largest": most}


def trained() -> dict[str, Any]:
    """Train with ST-PPO and its critic, stopped once by the scheduler's signal, and continue to the end."""
    home = folder()
    first = subprocess.Popen(line("train"), cwd=ROOT, env=environment())
    while first.poll() is None and iterations(home) < STOPPED:
        time.sleep(0.5)
    first.send_signal(signal.SIGUSR1)  # as Slurm does before the end of a job
    if (status := first.wait()) != RESUMABLE:
        raise AssertionError(f"after SIGUSR1 the run ended with {status}, not {RESUMABLE}")
    stopped = iterations(home)
    program("train", "--resume")
    rows = [json.loads(text) for text in (home / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "actor/clip_fraction" in row]
    held_out = {
        int(row["iteration"]): row["evaluate/exact_match"] for row in rows if "evaluate/exact_match" in row
    }
    if [row["iteration"] for row in steps] != list(range(1, ITERATIONS + 1)) or len(held_out) < 3:
        raise AssertionError(f"iterations {[row['iteration'] for row in steps]}, evaluations {held_out}")
    middle = sorted(row["seconds"] for row in steps)[len(steps) // 2]
    return {
        "held-out exact match after iteration": held_out,
        "reward of the last ten": sum(row["reward/mean"] for row in steps[-10:]) / len(steps[-10:]),
        "stopped and resumed after": stopped,
        "seconds per iteration, median": middle,
        **{f"of {name}": steps[-1][f"seconds/{name}"] for name in ("rollout", "score", "update", "reshard")},
        "engine - trainer, nats per token": max(row["mismatch/mean_abs"] for row in steps),
        "clip fraction, mean": sum(row["actor/clip_fraction"] for row in steps) / len(steps),
        "iterations with a correction": sum(row["actor/correction_scale"] < 1 for row in steps),
        "critic's explained variance, last": steps[-1]["critic/explained_variance"],
    }


def iterations(home: Path) -> int:
    """Return the number of the last iteration that the run has recorded."""
    file = home / "metrics.jsonl"
    rows = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return max((int(json.loads(row).get("iteration", 0)) for row in rows if row.endswith("}")), default=0)


def program(name: str, *more: str) -> None:
    run(line(name, *more))


def line(name: str, *more: str) -> list[str]:
    options = [word for word in more if word.startswith("--")]
    fields = [*settings(), *(word for word in more if not word.startswith("--"))]
    return [
        sys.executable,
        "-m",
        "megatron_stppo",
        name,
        str(EXAMPLE / "config.yaml"),
        *fields,
        *options,
    ]


def run(words: Sequence[str]) -> None:
    if status := subprocess.run(words, cwd=ROOT, env=environment(), check=False).returncode:
        raise AssertionError(f"exit status {status}: {' '.join(words)}")


def environment() -> dict[str, str]:
    paths = (str(EXAMPLE), str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


if __name__ == "__main__":
    main(prepared, reference, agreement, trained)
