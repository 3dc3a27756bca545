"""Whole runs: the project that `init` writes, and SmolLM2-135M-Instruct on word problems."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_stppo.observe.run_files import read_rows
from tools.gpu_checks.model import DEVICE, learner_of, work
from tools.processes import ROOT, run, started, variables

EXAMPLE = ROOT / "examples/smollm2"
PROGRAM = [sys.executable, "-m", "megatron_stppo"]
GPU = DEVICE == "cuda"
# (iterations, the one after which the run is stopped, iterations between evaluations, held-out problems)
ITERATIONS, STOPPED, EVALUATED, PROBLEMS = (60, 30, 20, 128) if GPU else (4, 2, 2, 8)
RESUMABLE = 85  # the exit code after a signal of the scheduler, docs/cluster.md
ROUNDING = 0.05 if GPU else 1e-4  # nats per token, mean: bfloat16 on a GPU, float32 on a CPU
MISMATCH = 0.02  # nats per token; a small model in bfloat16 has 6e-4 on a CPU
HOME = Path(os.environ.get("REAL_RUN") or ROOT / "runs/check-real")  # it stays after the checks
PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, (str(EXAMPLE), os.environ.get("PYTHONPATH"))))}


def serving() -> dict[str, Any]:
    """Train two iterations: the engine sleeps, wakes and is written twice; both sides' log-probs agree."""
    folder = work() / "first"
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    run([*PROGRAM, "init", folder], paths)
    run([sys.executable, "make_model.py"], paths, folder=folder)
    settings = ["run.iterations=2", "run.name=check", "model.dtype=bfloat16", "run.evaluate_every=1"]
    settings += ["rollout.gpu_memory_utilization=0.3"]
    run([*PROGRAM, "train", "config.yaml", *settings], paths, folder=folder)
    rows = [row for row in read_rows(folder / "runs/check/metrics.jsonl") if "mismatch/mean_abs" in row]
    worst = max(row["mismatch/mean_abs"] for row in rows)
    if len(rows) != 2 or not worst < MISMATCH:
        raise AssertionError(
            f"{len(rows)} iterations of 2; engine and trainer differ by {worst} nats per token"
        )
    seconds = {name: rows[-1][name] for name in rows[-1] if name.startswith("seconds/")}
    return {"difference of log-probs, nats": worst, "ratio max": rows[-1]["actor/ratio_max"]} | seconds


def settings() -> list[str]:
    own = [
        f"run.root={HOME.parent}",
        f"run.name={HOME.name}",
        f"run.iterations={ITERATIONS}",
        f"run.evaluate_every={EVALUATED}",
        f"run.checkpoint_every={EVALUATED}",
        f"model.path={HOME}/cold-start",
        f"data.train={HOME}/data/train.jsonl",
        f"data.evaluate={HOME}/data/evaluate.jsonl",
        f"data.demonstrations={HOME}/data/demonstrations.jsonl",
        f"cold_start.output={HOME}/cold-start",
    ]
    if not GPU:
        return [*own, "rollout.tasks_per_iteration=4"]
    # compiling vLLM's graphs takes longer than this run gains from them
    eager = ["rollout.gpu_memory_utilization=0.1", "rollout.vllm.enforce_eager=true"]
    # without this, vLLM measures the free memory, which other runs on this GPU change meanwhile
    eager += [f"rollout.vllm.kv_cache_memory_bytes={2**30}"]
    return [*own, *eager, "model.dtype=bfloat16", "update.tokens_per_microbatch=8192"]


def line(name: str, *more: str) -> list[str]:
    return [*PROGRAM, name, str(EXAMPLE / "config.yaml"), *settings(), *more]


def prepared() -> dict[str, Any]:
    """Import the model, write the problems, and teach the form of a call by the cold start."""
    began = time.monotonic()
    shutil.rmtree(HOME, ignore_errors=True)  # of an earlier check
    run([sys.executable, EXAMPLE / "build_problems.py", "--output", HOME / "data"], PATHS)
    held_out = HOME / "data/evaluate.jsonl"
    rows = held_out.read_text(encoding="utf-8").splitlines(keepends=True)
    held_out.write_text("".join(rows[:PROBLEMS]), encoding="utf-8")
    built = time.monotonic()
    run(line("cold-start", f"model.path={HOME}/data/model"), PATHS)
    return {"seconds of import and problems": built - began, "of the cold start": time.monotonic() - built}


def agreement() -> dict[str, Any]:
    """Compare the trainer's log-probs of some demonstrations with those of transformers in float32."""
    from megatron_stppo.cluster.launch import process

    process.prepare(engine=False)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_stppo.base.types import Task, Trajectory, Turn
    from megatron_stppo.config.file import load
    from megatron_stppo.data.demonstrations import read
    from megatron_stppo.data.packing import to_batch
    from megatron_stppo.training.stages import divided, score

    start = HOME / "cold-start"
    tokenizer = AutoTokenizer.from_pretrained(start, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, trust_remote_code=False)
    model.to(DEVICE)
    task, played, expected = Task("real", (), ("",), "train", 0), list[Trajectory](), []
    for demonstration in read(HOME / "data/demonstrations.jsonl", tokenizer, 1024):
        first, *rest = demonstration.token_ids
        turn = Turn(tuple(rest), (-1.0,) * len(rest), (), 0.0, ((0, len(rest)),))
        played.append(Trajectory(task, (first,), (turn,), "ok", group=len(played)))
        ids_1T = torch.tensor([[first, *rest]], device=model.device)
        with torch.no_grad():
            logprob_TV = model(ids_1T).logits[0, :-1].log_softmax(-1)
        expected.append(logprob_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].cpu())
    learner = learner_of(load(EXAMPLE / "config.yaml", [*settings(), "update.old_logprob=score"]))
    found_T = score(learner, divided(learner, to_batch(played), 0)).old_logprob_T
    assert found_T is not None
    apart_T = (found_T.cpu() - torch.cat(expected)).abs()
    mean, most = float(apart_T.mean()), float(apart_T.max())
    if not mean < ROUNDING:  # NaN fails too
        raise AssertionError(f"log-probs differ from transformers' by {mean} nats on average, {most} at most")
    return {"tokens": len(apart_T), "difference, nats per token": mean, "largest": most}


def trained() -> dict[str, Any]:
    """Train with ST-PPO and its critic, stopped once by the scheduler's signal, and continue to the end."""
    metrics = HOME / "metrics.jsonl"
    with started(line("train"), cwd=ROOT, env=variables(PATHS)) as first:
        while first.poll() is None and iterations(metrics) < STOPPED:
            time.sleep(0.5)
        first.send_signal(signal.SIGUSR1)  # as Slurm does before the end of a job
        if (status := first.wait()) != RESUMABLE:
            raise AssertionError(f"after SIGUSR1 the run ended with {status}, not {RESUMABLE}")
    stopped = iterations(metrics)
    run(line("train", "--resume"), PATHS)
    rows = read_rows(metrics)
    steps = [row for row in rows if "actor/clip_fraction" in row]
    held_out = {
        int(row["iteration"]): row["evaluate/exact_match"] for row in rows if "evaluate/exact_match" in row
    }
    if [row["iteration"] for row in steps] != list(range(1, ITERATIONS + 1)) or len(held_out) < 3:
        raise AssertionError(f"iterations {[row['iteration'] for row in steps]}, evaluations {held_out}")
    return {
        "held-out exact match after iteration": held_out,
        "reward of the last ten": sum(row["reward/mean"] for row in steps[-10:]) / len(steps[-10:]),
        "stopped and resumed after": stopped,
        "seconds per iteration, median": sorted(row["seconds"] for row in steps)[len(steps) // 2],
        **{f"of {name}": steps[-1][f"seconds/{name}"] for name in ("rollout", "score", "update", "reshard")},
        "engine - trainer, nats per token": max(row["mismatch/mean_abs"] for row in steps),
        "clip fraction, mean": sum(row["actor/clip_fraction"] for row in steps) / len(steps),
        "iterations with a correction": sum(row["actor/correction_scale"] < 1 for row in steps),
        # absent where rewards do not vary
        "critic's explained variance, last": steps[-1].get("critic/explained_variance"),
    }


def iterations(metrics: Path) -> int:
    """Return the number of the last iteration that the run has recorded."""
    rows = read_rows(metrics) if metrics.exists() else []
    return max((int(row.get("iteration", 0)) for row in rows), default=0)
