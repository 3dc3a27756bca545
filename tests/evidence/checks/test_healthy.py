"""No check of `verify` fails in healthy runs: families, presets, layouts, adapters, replicas and options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stppo.algorithm.variants import VARIANTS
from tests.rollout.vllm.tiny import build_model
from tests.training.loop import small_run

FAMILIES = (
    "qwen2",
    "qwen3",
    "llama",
    "qwen3_moe",
    "mixtral",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "gpt_oss",
)
LAYOUTS = {
    "tensor": ("parallel.tensor=2",),
    "sequence": ("parallel.tensor=2", "parallel.sequence=true"),
    "pipeline": ("parallel.tensor=1", "parallel.pipeline=2"),
    "context": ("parallel.tensor=1", "parallel.context=2"),
    "data": ("parallel.tensor=1",),
    "distributed optimizer": ("parallel.tensor=1", "update.actor.distributed=true"),
    "engine on both ranks": ("parallel.tensor=1", "rollout.engine_tensor=2"),
}
MIXTURES = ("qwen3_moe", "mixtral", "qwen3_5_moe", "gpt_oss")
ONE, ADAPTERS = ("parallel.tensor=1",), ("model.lora.rank=4",)
GROUPS = ("rollout.samples_per_task=4", "algorithm.whiten=true")
FACTORS = ("algorithm.rate=open_loop", "algorithm.rate_profile=[1,0.5,0.5,1]")
SERVED = (*ONE, "serving.replicas=1")
RUNS: dict[str, tuple[int, str, tuple[str, ...]]] = {  # {name: (ranks, family, overrides)}
    **{f"{family}": (1, family, ONE) for family in FAMILIES},
    **{f"{family}, experts": (2, family, LAYOUTS["sequence"]) for family in FAMILIES if family in MIXTURES},
    "gated delta nets on two ranks": (2, "qwen3_5", LAYOUTS["tensor"]),
    **{
        f"{family}, adapters {sync}": (1, family, (*ONE, *ADAPTERS, f"model.lora.sync={sync}"))
        for family in FAMILIES[:3]
        for sync in ("merged", "adapter")
    },
    **{
        name: (1, "qwen3", (*ONE, f"algorithm.preset={name}", *GROUPS))
        for name in VARIANTS
        if name != "distil"  # it needs a teacher
    },
    "fixed factors of the rate": (1, "qwen3", (*ONE, *FACTORS)),
    **{f"layout {name}": (2, "qwen3", given) for name, given in LAYOUTS.items()},
    "expert parallelism": (2, "qwen3_moe", (*ONE, "parallel.expert=2")),
    "experts of the old policy": (1, "qwen3_moe", (*ONE, "algorithm.routing_replay=old_policy")),
    "recomputation": (1, "qwen3", (*ONE, "model.recompute=full")),
    "offload": (1, "qwen3", (*ONE, "update.offload=all")),
    "replica": (1, "qwen3", SERVED),
    "replica, adapters": (1, "qwen3", (*SERVED, *ADAPTERS)),
    "replica, two ranks": (2, "qwen3", (*LAYOUTS["tensor"], "serving.replicas=1")),
}
GRPO = (*ONE, "algorithm.preset=grpo", *GROUPS)
MASK, KL, TOP_P = "algorithm.truncated=mask", "algorithm.rate=kl", "rollout.top_p=0.9"
K3 = "algorithm.kl_in=loss algorithm.kl_estimator=k3"
OVERLONG = "algorithm.overlong_from=4 algorithm.overlong_to=16"
R2, R3 = "algorithm.routing_replay=old_policy", "algorithm.routing_replay=rollout"
TURNS = "algorithm.advantage=group_turn algorithm.gamma=0.9"
BOOTSTRAP, OBSERVED = "algorithm.truncated=bootstrap", "algorithm.gae_observations=true"
OPTIONS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    # {name: (family, overrides, options that are on together, and each alone if a check fails)}
    "of st_ppo": ("qwen3", ONE, (BOOTSTRAP, OBSERVED, KL, K3, TOP_P)),
    "of grpo": ("qwen3", GRPO, (MASK, OVERLONG, KL, K3, TOP_P)),
    "of group_turn": ("qwen3_moe", GRPO, (TURNS, MASK, OVERLONG, R2)),
    "with the engine's experts": ("qwen3_moe", ONE, (R3, MASK, OVERLONG)),
}


def faults(folder: Path, ranks: int, family: str, given: tuple[str, ...]) -> str:
    """Return the output of `verify` if it fails, else ""."""
    folder.mkdir(exist_ok=True)
    config, out = small_run.write(folder), folder / "verify.json"
    build_model(folder / "own", family)
    honest = ("environment.kind=search", "environment.max_turns=3")  # that of the file pays for any text
    words = ("verify", str(config), f"model.path={folder / 'own'}", *honest, *given)
    done = small_run.run_command((*words, "--json", str(out)), ranks=ranks)
    lines = json.loads(out.read_text()) if out.exists() else []
    if done.returncode or len(lines) < 12:
        return done.stdout + done.stderr[-3000:]
    assert {line["verdict"] for line in lines} <= {"ok", "skipped"}
    return ""


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_has_no_failed_check(name: str, tmp_path: Path) -> None:
    wrong = faults(tmp_path, *RUNS[name])
    assert not wrong, wrong


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_options_together_have_no_failed_check(name: str, tmp_path: Path) -> None:
    family, given, options = OPTIONS[name]
    if wrong := faults(tmp_path, 1, family, (*given, *" ".join(options).split())):
        alone = {
            option: faults(tmp_path / option, 1, family, (*given, *option.split())) for option in options
        }
        raise AssertionError(f"{[option for option in options if alone[option]]} fail alone; {wrong}")
