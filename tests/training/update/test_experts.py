from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ranks import run_ranks
from tests.training.update import experts, layouts

# ranks, mesh, recompute, number of times a step uses a map: one pass for the loss, one for the clipping bias
CASES = {
    "experts, tensor and sequence": (4, {"tensor": 2, "sequence": True, "expert": 2}, "none", 2),
    "pipeline, layers computed again": (2, {"pipeline": 2}, "full", 4),
}


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder of the model, uses of a map, observations of every rank)."""
    root = tmp_path_factory.mktemp("experts")
    layouts.write_model(root / "hf", "qwen3_moe")
    world, parallel, recompute, uses = CASES[request.param]
    arguments = (str(root / "hf"), str(root / "checkpoints"), parallel, recompute)
    return root / "hf", uses, run_ranks(experts.observe, world, *arguments)


def test_an_update_uses_the_experts_that_the_old_policy_chose_and_no_others(seen: Any) -> None:
    _, uses, ranks = seen
    for rank in ranks:
        assert rank["moved"] > 0.5, "the routers must choose other experts than the old policy"
        *counts, others = rank["uses"]
        assert counts == [uses] * len(counts) and others == 0


def test_dummy_tokens_go_to_the_same_experts_in_a_plain_and_in_a_replayed_pass(seen: Any) -> None:
    # Each expert multiplies the same rows, so the kernel that a CPU chooses for a number of rows does not
    # matter.
    for rank in seen[2]:
        assert rank["plain maps"] == rank["replayed maps"]


def test_sequence_parallelism_pads_this_batch(seen: Any, request: pytest.FixtureRequest) -> None:
    padded = sum(rank["dummies"] for rank in seen[2]) > 0
    assert padded == ("sequence" in request.node.callspec.params["seen"])


def test_replaying_what_the_router_would_choose_changes_no_bit(seen: Any) -> None:
    assert [rank["differs"] for rank in seen[2]] == [{}] * len(seen[2])


def test_recorded_experts_are_those_of_transformers(seen: Any) -> None:
    folder, _, ranks = seen
    recorded = torch.tensor(ranks[0]["routes"]).sort(-1)[0]  # the first stage's layers
    assert torch.equal(reference(folder)[:, : recorded.shape[1]], recorded)


def test_a_recording_knows_nothing_of_the_tokens_of_an_earlier_one() -> None:
    assert run_ranks(experts.recorded_again, 1) == [(1, 1)]


def test_weights_and_optimizer_of_shared_experts_come_back_from_a_checkpoint(seen: Any) -> None:
    assert all(rank["loaded"] for rank in seen[2])


def reference(folder: Path) -> torch.Tensor:
    """Return [P, layers, k], ascending: the experts to which transformers sends every token of the batch."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given, parts = layouts.batch(), []
    for first, last in zip(given.sequence_offsets[:-1], given.sequence_offsets[1:], strict=True):
        out = model(given.tokens_P[first:last][None], output_router_logits=True)
        parts.append(torch.stack([logits.topk(3).indices for logits in out.router_logits], 1))
    return torch.cat(parts).sort(-1)[0]
