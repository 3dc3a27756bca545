"""Run some layers of large models at the sizes of one rank: time, memory against the plan, host waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from gpu_checks import main
from gpu_checks.machine import ceilings, synchronize
from gpu_checks.model import configuration, trajectories, write_model
from gpu_checks.training import EXPERTS, work
from megatron_stppo.cluster.launch import process

# One rank of tensor=8: 5 of 40 heads, 1 of 8 key-value heads, an eighth of the MLP and of the vocabulary.
RANK_OF_32B = {"hidden": 5120, "ffn": 3456, "layers": 4, "heads": 5, "kv_heads": 1, "head_dim": 128}
RANK_OF_32B |= {"vocab": 18_992}
# Qwen3-30B-A3B as a rank without expert parallelism has it, but for the number of layers and the vocabulary.
OF_30B_A3B = {"hidden": 2048, "ffn": 6144, "layers": 2, "heads": 32, "kv_heads": 4, "head_dim": 128}
OF_30B_A3B |= {"vocab": 18_992}
EXPERTS_OF_30B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def sections(gpu: bool) -> tuple[dict[str, Any], int, int]:
    """Return the configuration's sections, the tokens of a trajectory and the number of trajectories."""
    longest = 4096 if gpu else 128
    context = {"max_context": longest, "max_prompt_tokens": longest // 4, "kv_cache_gib": 0.1}
    given = {
        "model": {"dtype": "bfloat16"},
        "update": {"minibatches": 1, "tokens_per_microbatch": 2 * longest, "offload": "all"},
        "rollout": context
        | {"max_turn_tokens": longest // 8, "tasks_per_iteration": 1, "samples_per_task": 16},
        "environment": {"max_turns": 3, "max_observation_tokens": longest // 16},
    }
    return given, longest, 16


def layer_slice() -> dict[str, Any]:
    """Measure layers of the 32B, and offload and load everything."""
    process.prepare(engine=False)
    gpu = torch.cuda.is_available()
    folder = work() / "slice"
    if not folder.exists():
        write_model(folder, **(RANK_OF_32B if gpu else {}))
    found = _phases(folder)
    (work() / "slice.json").write_text(json.dumps(found), encoding="utf-8")
    return found


def expert_slice() -> dict[str, Any]:
    """Measure layers of the 30B with experts."""
    process.prepare(engine=False)
    gpu = torch.cuda.is_available()
    folder = work() / "expert-slice"
    if not folder.exists():
        write_model(folder, EXPERTS_OF_30B if gpu else EXPERTS, **(OF_30B_A3B if gpu else {}))
    return _phases(folder)


def _phases(folder: Path) -> dict[str, Any]:
    """Score and update once for warm-up, once for time and memory, and once to count the host's waits."""
    from megatron_stppo.data.packing import groups_of, to_batch
    from megatron_stppo.model.learner import build_learner
    from megatron_stppo.observe.throughput import phase_flop
    from megatron_stppo.training.advantage import estimate
    from megatron_stppo.training.stages import divided, score, update
    from megatron_stppo.weights.sharding.hf_names import read_shape

    given, longest, count = sections(torch.cuda.is_available())
    config = configuration(folder, **given)
    mesh, shape = process.start(config), read_shape(folder)
    learner = build_learner(config, shape, mesh, process.dtype(config))
    played = trajectories(shape.vocab, [longest] * count)
    action = sum(len(turn.token_ids) for t in played for turn in t.turns)
    found: dict[str, Any] = {"tokens": longest * count, "action tokens": action}
    for measured in (_timed, _timed, _waits):  # the second time stays
        learner.load_for("score")
        with measured(found, "score"):
            batch = score(learner, divided(learner, to_batch(played), 0))
        batch = estimate(batch, config.algorithm, groups_of([t.summary for t in played]))
        learner.load_for("update")
        with measured(found, "update"):
            row = update(learner, batch, 0)[0]
    if row["actor/skipped"] or row["critic/skipped"]:
        raise AssertionError(f"a step was skipped; its loss or gradient is not finite: {row}")
    peak = ceilings()["bfloat16_tflop_per_s"]
    for phase, operations in phase_flop(config, shape, batch).items():
        rate = operations / found[f"{phase} s"] / 1e12
        found |= {f"{phase} tflop/s": rate, f"{phase} of the matrix products' rate": rate / peak}
    return found | _offloaded(learner)


@contextmanager
def _timed(found: dict[str, Any], phase: str) -> Iterator[None]:
    """Add the seconds of a phase, and on a GPU its peak memory in GiB, to `found`."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    start = time.perf_counter()
    yield
    synchronize()
    found[f"{phase} s"] = time.perf_counter() - start
    if gpu:
        found[f"{phase} peak GiB"] = torch.cuda.max_memory_allocated() / 2**30


@contextmanager
def _waits(found: dict[str, Any], phase: str) -> Iterator[None]:
    """Add the number of times that the host waits for the GPU in a phase, and where, to `found`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        yield
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "called a synchronizing" in str(w.message)]
    found[f"{phase} host waits"] = len(waits)
    places = Counter(f"{'/'.join(w.filename.split('/')[-2:])}:{w.lineno}" for w in waits)
    found[f"{phase} host waits at"] = dict(places.most_common(12))


def against_plan() -> dict[str, Any]:
    """Return what `plan` says for one GPU, and the peaks that `layer_slice` measured divided by it."""
    given, _, _ = sections(torch.cuda.is_available())
    found = json.loads((work() / "slice.json").read_text(encoding="utf-8"))
    file = work() / "slice.yaml"
    model = {"path": str(work() / "slice"), "layers": "local"} | given["model"]
    file.write_text(
        yaml.safe_dump(given | {"model": model, "algorithm": {"preset": "st_ppo"}}), encoding="utf-8"
    )
    line = [sys.executable, "-m", "megatron_stppo", "plan", str(file), "--gpus", "1", "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        line, capture_output=True, text=True, env=environment, timeout=120, encoding="utf-8"
    )
    if not done.stdout.startswith("{"):
        raise AssertionError(f"plan failed: {done.stderr.strip()[-500:]}")
    totals = json.loads(done.stdout)["stages"][0]["totals"]
    planned = {f"{phase} planned GiB": totals[phase] / 2**30 for phase in ("score", "update")}
    ratios = {
        f"{phase} peak / planned": found[f"{phase} peak GiB"] / planned[f"{phase} planned GiB"]
        for phase in ("score", "update")
        if f"{phase} peak GiB" in found
    }
    return planned | ratios


def _offloaded(learner: Any) -> dict[str, Any]:
    """Offload everything and load it again; the bits of all weights must be the same."""
    from megatron_stppo.model import build

    def bits() -> list[int]:
        weights = build.named_parameters(learner.policy).values()
        return [int(x.detach().view(torch.int16).long().sum()) for x in weights]

    learner.load_for("update")
    before = bits()
    synchronize()
    start = time.perf_counter()
    learner.load_for("rollout")
    synchronize()
    left = time.perf_counter()
    learner.load_for("update")
    synchronize()
    end = time.perf_counter()
    if bits() != before:
        raise AssertionError("weights have other bits after they were offloaded and loaded")
    return {"offload s": left - start, "load s": end - left}


if __name__ == "__main__":
    main(layer_slice, against_plan, expert_slice)
