"""The experts that a real vLLM engine chose are those that megatron's models use in scoring and update."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stppo.base.types import Trajectory
from tests.ranks import run_ranks
from tests.rollout.vllm import preempting, replaying
from tests.rollout.vllm.test_families import SIZES
from tests.rollout.vllm.tiny import build_tokenizer
from tests.training.update.layouts import write_model

LAYERS, CHOSEN = 4, 2
LARGE, SMALL = 0.05, 0.001  # GiB; eight trajectories do not fit into the small cache
# name: (family, ranks, layout, engine_tensor, cache, asynchronous)
CASES: dict[str, tuple[str, int, dict[str, int], int, float, bool]] = {
    "one rank": ("qwen3_moe", 1, {}, 1, SMALL, False),
    "pipeline": ("qwen3_moe", 2, {"pipeline": 2, "virtual": 2}, 1, LARGE, True),
}
MORE: dict[str, tuple[str, int, dict[str, int], int, float, bool]] = {
    "experts, engine of two": ("qwen3_moe", 2, {"expert": 2}, 2, LARGE, False),
    "mixtral": ("mixtral", 1, {}, 1, LARGE, False),
}
NAMES = [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3_moe", "mixtral"):
        write_model(
            root / family, family, **SIZES | {"num_hidden_layers": LAYERS, "num_experts_per_tok": CHOSEN}
        )
        build_tokenizer().save_pretrained(root / family)
    return root


@pytest.fixture(scope="module")
def see(root: Path) -> Any:
    """A function from the name of a case to the observations of its ranks."""

    @functools.cache
    def see(name: str) -> list[dict[str, Any]]:
        family, ranks, *given = (CASES | MORE)[name]
        return run_ranks(replaying.observe, ranks, root / family, *given, timeout=240)

    return see


@pytest.mark.parametrize("name", NAMES)
def test_recorded_experts_are_those_of_transformers(see: Any, root: Path, name: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        root / (CASES | MORE)[name][0], dtype=torch.float32
    ).eval()
    played = [t for rank in see(name) for t in rank["own"]]
    assert max(len(t.turns) for t in played) == 3
    for trajectory in played:
        with torch.no_grad():
            out = model(torch.tensor([trajectory.token_ids]), output_router_logits=True)
        expected = torch.stack([logits.topk(CHOSEN).indices for logits in out.router_logits], 1)
        assert torch.equal(routes(trajectory).sort(-1)[0], expected[:-1].sort(-1)[0])


@pytest.mark.parametrize("name", NAMES)
def test_scoring_and_update_use_the_experts_that_the_engine_chose_and_no_others(see: Any, name: str) -> None:
    for rank in see(name):
        # the update computes all trajectories again for actor/kl_after
        for times, (*counts, others) in ((1, rank["scoring"]), (2, rank["updating"])):
            assert counts and set(counts) == {times} and others == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_log_probs_of_engine_and_trainer_agree(see: Any, name: str) -> None:
    for rank in see(name):
        assert rank["mismatch"] < 1e-5
        assert rank["old"] == see(name)[0]["old"]


def test_histories_and_shared_prompts_come_from_the_prefix_cache(see: Any) -> None:
    assert all(rank["cached"] > 0 for name in CASES for rank in see(name))


def test_neither_preemption_nor_asynchronous_steps_change_experts(see: Any) -> None:
    (one,), ranks = see("one rank"), see("pipeline")
    assert one["preempted"] > 0 and one["scheduler"] == "Scheduler"
    assert all(rank["preempted"] == 0 and rank["scheduler"] == "AsyncScheduler" for rank in ranks)
    assert kept([one]) == kept(ranks)


def test_a_request_that_is_preempted_while_its_last_token_is_in_flight_keeps_its_experts(root: Path) -> None:
    for undisturbed, disturbed in run_ranks(preempting.preempted_at_the_end, 1, root / "qwen3_moe")[
        0
    ].values():
        assert disturbed == undisturbed


def test_dummy_tokens_of_a_cuda_graph_are_dropped_and_unknown_experts_are_refused(see: Any) -> None:
    stored, refusal = see("one rank")[0]["second runner"]
    assert stored == [255, 255, 4, 255, 255, 3, 255, 255]
    assert refusal == (
        "algorithm.routing_replay=rollout: vLLM reported no experts for some of the 3 tokens of request 7/1; "
        "set it to old_policy or off"
    )


@pytest.mark.parametrize("name", ["pipeline", pytest.param("experts, engine of two", marks=pytest.mark.long)])
def test_layouts_score_as_one_rank_does(see: Any, name: str) -> None:
    one, ranks = see("one rank"), see(name)
    assert kept(ranks) == kept(one)
    torch.testing.assert_close(
        torch.tensor(ranks[0]["old"]), torch.tensor(one[0]["old"]), atol=1e-5, rtol=1e-5
    )


def kept(ranks: list[dict[str, Any]]) -> list[tuple[tuple[int, ...], bytes]]:
    """Return tokens and experts of all trajectories."""
    return [(trajectory.token_ids, trajectory.routes) for rank in ranks for trajectory in rank["own"]]


def routes(trajectory: Trajectory) -> torch.Tensor:
    given = np.frombuffer(trajectory.routes, dtype=np.uint8)
    return torch.from_numpy(given.astype(np.int64)).view(-1, LAYERS, CHOSEN)
