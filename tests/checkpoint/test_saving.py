"""These tests run in one process that has imported megatron and forks; `make chaos` runs many more cases."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import ConfigError
from tests.ranks import context
from tests.training.update import layouts

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    layouts.write_model(
        folder, num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2
    )
    return folder


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Return a function that calls a function of this file in that process."""
    with ProcessPoolExecutor(1, context(), prepare) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def prepare() -> None:
    process.prepare()
    torch.set_num_threads(1)


def case(name: str, *arguments: Any) -> int:
    from tests.chaos import one_rank

    return one_rank.in_child(getattr(one_rank, name), *arguments)


CASES = (
    "goes_on",
    "many_episodes",
    "writer_breaks",
    "not_planned",
    "not_read",
    "flushed",
    "disk_full",
    "kept",
    "not_finite",
)


@pytest.mark.parametrize("name", CASES)
def test_the_saver_handles_resumes_failures_and_full_disks(
    run: Run, model: Path, tmp_path: Path, name: str
) -> None:
    assert run(case, name, tmp_path, model, *([[]] if name == "disk_full" else [])) == 0


def test_a_save_killed_at_any_call_leaves_the_previous_or_the_new_step(
    run: Run, model: Path, tmp_path: Path
) -> None:
    """Kill at every rename, because it changes what is visible, and at four random calls."""
    left, wrong = run(die, tmp_path, model, 4)
    assert not wrong
    assert left == {1, 2}, "some kills must come before and some after the publication"


def die(root: Path, model: Path, draws: int) -> tuple[set[int], list[str]]:
    from tests.chaos.killed_saves import Bench

    bench = Bench(root, model, background=True)
    chosen = {n for n, name in enumerate(bench.calls, 1) if name in ("rename", "replace")}
    chosen |= set(random.Random(0).sample(range(1, len(bench.calls) + 1), draws))
    results = [bench.die_at(call) for call in sorted(chosen)]
    return {step for step, _ in results}, [wrong for _, wrong in results if wrong]


def test_random_damage_is_detected_and_the_newest_undamaged_step_is_used(run: Run, tmp_path: Path) -> None:
    assert run(damage, tmp_path, 100) == 0


def damage(root: Path, examples: int) -> int:
    from tests.chaos import corruption, one_rank

    return one_rank.in_child(corruption.always_noticed, root, examples, 0)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_the_field(run: Run) -> None:
    for message, beginning in zip(
        run(refuse),
        (
            "was written with model.layers=local, this run has transformer_engine; set model.layers=local.",
            "was written with model.layers=transformer_engine, this run has local; set "
            "model.layers=transformer_engine on a machine with a GPU and TransformerEngine.",
            "was written with parallel.expert=1, whose optimizer state does not fit parallel.expert=4 with "
            "update's distributed=false",
            "was written with update.critic.distributed=true, this run has false; set it as it was",
        ),
        strict=True,
    ):
        assert message.startswith(f"step_3: {beginning}")


def refuse() -> list[str]:
    from megatron_stppo.checkpoint.loading import check_distributed, check_experts, check_layers, layers_of

    local, fused = torch.nn.Module(), torch.nn.Module()
    fused.linear_qkv = torch.nn.Module()
    fused.linear_qkv.layer_norm_weight = torch.nn.Parameter(torch.ones(2))
    assert (layers_of([local]), layers_of([fused])) == ("local", "transformer_engine")
    check_layers(Path("step_3"), {"layers": "local"}, [local])
    chunk = SimpleNamespace(config=SimpleNamespace(expert_model_parallel_size=4))
    shared = SimpleNamespace(chunks=[chunk], settings=SimpleNamespace(distributed=False))
    check_experts(Path("step_3"), {"expert": 2}, shared)
    messages = []
    check_distributed(Path("step_3"), {"distributed": {"actor": True, "critic": False}}, "critic", shared)
    for check, *given in (
        (check_layers, {"layers": "local"}, [fused]),
        (check_layers, {"layers": "transformer_engine"}, [local]),
        (check_experts, {"expert": 1}, shared),
        (check_distributed, {"distributed": {"critic": True}}, "critic", shared),
    ):
        with pytest.raises(ConfigError) as error:
            check(Path("step_3"), *given)
        messages.append(str(error.value))
    return messages
