"""Some layers of Qwen2.5-32B at the sizes of one rank of eight: time, memory against the plan, host waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
import yaml

from gpu_checks import main
from gpu_checks.machine import ceilings, synchronize
from gpu_checks.model import configuration, trajectories, write_model
from gpu_checks.training import work
from megatron_stppo.launch import process

# One rank of tensor=8: 5 of 40 heads, 1 of 8 key-value heads, an eighth of the MLP and of the vocabulary.
RANK_OF_32B = {"hidden": 5120, "ffn": 3456, "layers": 4, "heads": 5, "kv_heads": 1, "head_dim": 128}
RANK_OF_32B |= {"vocab": 18_992}


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
    """Score and update once for warm-up, then measure both, and offload and load everything."""
    process.prepare(engine=False)
    from megatron_stppo.advantage.estimate import estimate
    from megatron_stppo.data.packing import groups_of, to_batch
    from megatron_stppo.learner import build_learner
    from megatron_stppo.sharding.hf_names import read_shape
    from megatron_stppo.stages import score, update
    from megatron_stppo.telemetry.throughput import phase_flop

    gpu = torch.cuda.is_available()
    given, longest, count = sections(gpu)
    folder = work() / "slice"
    if not folder.exists():
        write_model(folder, **(RANK_OF_32B if gpu else {}))
    config = configuration(folder, **given)
    mesh, shape = process.start(config), read_shape(folder)
    learner = build_learner(config, shape, mesh, process.dtype(config))
    played = trajectories(shape.vocab, [longest] * count)
    action = sum(len(turn.token_ids) for t in played for turn in t.turns)
    found: dict[str, Any] = {"tokens": longest * count, "action tokens": action}
    for _ in range(2):  # the second time is measured
        learner.load_for("score")
        with _measured(found, "score"):
            batch = score(learner, to_batch(played), 0)
        batch = estimate(batch, config.algorithm, groups_of([t.summary for t in played]))
        learner.load_for("update")
        with _measured(found, "update"):
            row = update(learner, batch, 0)[0]
    if row["actor/skipped"] or row["critic/skipped"]:
        raise AssertionError(f"a step was skipped; its loss or gradient is not finite: {row}")
    peak = ceilings()["bfloat16_tflop_per_s"]
    for phase, operations in phase_flop(config, shape, batch).items():
        rate = operations / found[f"{phase} s"] / 1e12
        found |= {f"{phase} tflop/s": rate, f"{phase} of the matrix products' rate": rate / peak}
    found |= _offloaded(learner)
    (work() / "slice.json").write_text(json.dumps(found))
    return found


class _measured:
    """Context that adds the time, the peak memory in GiB and the host's waits of a phase to `found`."""

    def __init__(self, found: dict[str, Any], phase: str) -> None:
        self._found, self._phase, self._gpu = found, phase, torch.cuda.is_available()
        self._warnings = warnings.catch_warnings(record=True)

    def __enter__(self) -> None:
        self._caught = self._warnings.__enter__()
        warnings.simplefilter("always")
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode("warn")
        synchronize()
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        synchronize()
        found, phase = self._found, self._phase
        found[f"{phase} s"] = time.perf_counter() - self._start
        if self._gpu:
            torch.cuda.set_sync_debug_mode("default")
            found[f"{phase} peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        self._warnings.__exit__(None, None, None)
        waits = [w for w in self._caught or () if "synchroniz" in str(w.message)]
        found[f"{phase} host waits"] = len(waits)
        places = Counter(f"{'/'.join(w.filename.split('/')[-2:])}:{w.lineno}" for w in waits)
        found[f"{phase} host waits at"] = dict(places.most_common(12))


def against_plan() -> dict[str, Any]:
    """Return what `plan` says for one GPU, and the peaks that `layer_slice` measured divided by it."""
    given, _, _ = sections(torch.cuda.is_available())
    found = json.loads((work() / "slice.json").read_text())
    file = work() / "slice.yaml"
    model = {"path": str(work() / "slice"), "layers": "local"} | given["model"]
    file.write_text(yaml.safe_dump(given | {"model": model, "algorithm": {"preset": "st_ppo"}}))
    line = [sys.executable, "-m", "megatron_stppo", "plan", str(file), "--gpus", "1", "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)
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
    main(layer_slice, against_plan)
