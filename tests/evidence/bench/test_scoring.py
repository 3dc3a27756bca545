from __future__ import annotations

import torch
from torch import nn

from megatron_stppo.evidence.bench.scoring import nudging, resemblance, roundings

BFLOAT16 = 2**-7


def test_a_limit_has_the_tokens_own_nudge_the_mean_nudge_and_the_rounding_of_logit_and_log_prob() -> None:
    moved_T, logprob_T, logit_T = (
        torch.tensor([0.0, 0.2]),
        torch.tensor([-1.0, -3.0]),
        torch.tensor([5.0, 4.0]),
    )
    found_T = roundings(moved_T, logprob_T, logit_T, eps=0.01)
    # 0 + 0.1 + 0.01 * (5 + 1), and 0.2 + 0.1 + 0.01 * (4 + 3)
    torch.testing.assert_close(found_T, torch.tensor([0.16, 0.37]))


def test_nudges_move_each_weight_by_one_rounding_at_most_and_are_undone() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    before = layer.weight.detach().clone()
    with nudging([layer], BFLOAT16) as nudge:
        nudge(1)
        first = layer.weight.detach().clone()
        nudge(2)
        second = layer.weight.detach().clone()
        nudge(1)
        assert torch.equal(layer.weight, first), "the seed decides, not the nudge before"
    assert torch.equal(layer.weight, before)
    for nudged in (first, second):
        moved = (nudged.float() / before.float() - 1).abs()
        assert 0 < moved.mean() and moved.max() <= 1.5 * BFLOAT16  # rounded to bfloat16 again
    assert not torch.equal(first, second)


def version(seed: int) -> torch.Tensor:
    """Log-probs of 20 trajectories of 10 tokens."""
    return -3 + 0.5 * torch.randn(200, generator=torch.Generator().manual_seed(seed))


SEQUENCE = torch.arange(20).repeat_interleave(10)
NAMED, OTHER, NOISE = version(0), version(1), (version(2) + 3) / 5


def test_the_share_of_another_version_is_0_for_the_named_and_1_for_the_other_version() -> None:
    own = resemblance(NAMED, NAMED, OTHER, NAMED, SEQUENCE)
    other = resemblance(NAMED, NAMED, OTHER, OTHER, SEQUENCE)
    assert own is not None and (own.share, own.error) == (0, 0) and not own.differs
    assert other is not None and abs(other.share - 1) < 1e-12 and other.differs


def test_the_trainers_own_rounding_is_not_taken_for_another_version() -> None:
    """The trainer's log-probs have errors of 0.1, and the versions differ by as little."""
    near, rounded = NAMED + (OTHER - NAMED) / 10, NAMED + NOISE
    found = resemblance(rounded, NAMED, near, NAMED, SEQUENCE)
    naive = resemblance(rounded, rounded, near, NAMED, SEQUENCE)
    assert found is not None and naive is not None
    assert abs(found.share) < 4 * found.error and not found.differs
    assert naive.differs, "without the nudged log-probs it would be"
    planted = resemblance(rounded, NAMED, near, near, SEQUENCE)
    assert planted is not None and planted.differs


def test_equal_versions_and_few_trajectories_are_not_compared() -> None:
    assert resemblance(NAMED, NAMED, NAMED, OTHER, SEQUENCE) is None
    assert resemblance(NAMED[:190], NAMED[:190], OTHER[:190], OTHER[:190], SEQUENCE[:190]) is None
