"""Run some layers of large models at the sizes of one rank: time, and memory against the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_stppo.data.packing import groups_of, to_batch
from megatron_stppo.model import build
from megatron_stppo.observe.throughput import phase_flop
from megatron_stppo.training.advantage import estimate
from megatron_stppo.training.stages import divided, score, update
from tools.gpu_checks.machine import ceilings
from tools.gpu_checks.model import DEVICE, EXPERTS, configuration, learner_of, once, trajectories, work
from tools.measuring import timed
from tools.processes import variables

GPU = DEVICE == "cuda"
# One rank of tensor=8: 5 of 40 heads, 1 of 8 key-value heads, an eighth of the MLP and of the vocabulary.
RANK_OF_32B = {"hidden": 5120, "ffn": 3456, "layers": 4, "heads": 5, "kv_heads": 1, "head_dim": 128}
RANK_OF_32B |= {"vocab": 18_992}
# Qwen3-30B-A3B as a rank without expert parallelism has it, but for the number of layers and the vocabulary.
OF_30B_A3B = {"hidden": 2048, "ffn": 6144, "layers": 2, "heads": 32, "kv_heads": 4, "head_dim": 128}
OF_30B_A3B |= {"vocab": 18_992}
EXPERTS_OF_30B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def sections() -> tuple[dict[str, Any], int, int]:
    """Return the configuration's sections, the tokens of a trajectory and the number of trajectories."""
    longest = 4096 if GPU else 128
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
    found = _phases(once("slice", **(RANK_OF_32B if GPU else {})))
    (work() / "slice.json").write_text(json.dumps(found), encoding="utf-8")
    return found


def expert_slice() -> dict[str, Any]:
    """Measure layers of the 30B with experts."""
    experts, sizes = (EXPERTS_OF_30B, OF_30B_A3B) if GPU else (EXPERTS, {})
    return _phases(once("expert-slice", experts, **sizes))


def _phases(folder: Path) -> dict[str, Any]:
    """Score and update once for warm-up, and once for time and memory."""
    given, longest, count = sections()
    config = configuration(folder, **given)
    learner = learner_of(config)
    played = trajectories(learner.shape.vocab, [longest] * count)
    action = sum(len(turn.token_ids) for t in played for turn in t.turns)
    found: dict[str, Any] = {"tokens": longest * count, "action tokens": action}
    for _ in range(2):  # the second time stays
        learner.load_for("score")
        with _measured(found, "score"):
            batch = score(learner, divided(learner, to_batch(played), 0))
        batch = estimate(batch, config.algorithm, groups_of([t.summary for t in played]))
        learner.load_for("update")
        with _measured(found, "update"):
            row = update(learner, batch, 0)[0]
    if row["actor/skipped"] or row["critic/skipped"]:
        raise AssertionError(f"a step was skipped; its loss or gradient is not finite: {row}")
    peak = ceilings()["bfloat16_tflop_per_s"]
    for phase, operations in phase_flop(config, learner.shape, batch).items():
        rate = operations / found[f"{phase} s"] / 1e12
        found |= {f"{phase} tflop/s": rate, f"{phase} of the matrix products' rate": rate / peak}
    return found | _offloaded(learner)


@contextmanager
def _measured(found: dict[str, Any], phase: str) -> Iterator[None]:
    """Add the seconds of a phase, and on a GPU its peak memory in GiB, to `found`."""
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    with timed(found, f"{phase} s"):
        yield
    if GPU:
        found[f"{phase} peak GiB"] = torch.cuda.max_memory_allocated() / 2**30


def against_plan() -> dict[str, Any]:
    """Return what `plan` says for one GPU, and the peaks that `layer_slice` measured divided by it."""
    given = sections()[0]
    found = json.loads((work() / "slice.json").read_text(encoding="utf-8"))
    file = work() / "slice.yaml"
    model = {"path": str(work() / "slice"), "layers": "local"} | given["model"]
    file.write_text(
        yaml.safe_dump(given | {"model": model, "algorithm": {"preset": "st_ppo"}}), encoding="utf-8"
    )
    line = [sys.executable, "-m", "megatron_stppo", "plan", str(file), "--gpus", "1", "--json"]
    environment = variables({"CUDA_VISIBLE_DEVICES": ""})
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


def _offloaded(learner: Any) -> dict[str, float]:
    """Offload everything and load it again; the bits of all weights must be the same."""

    def bits() -> list[int]:
        weights = build.named_parameters(learner.policy).values()
        return [int(x.detach().view(torch.int16).long().sum()) for x in weights]

    learner.load_for("update")
    before, seconds = bits(), dict[str, float]()
    with timed(seconds, "offload s"):
        learner.load_for("rollout")
    with timed(seconds, "load s"):
        learner.load_for("update")
    if bits() != before:
        raise AssertionError("weights have other bits after they were offloaded and loaded")
    return seconds
