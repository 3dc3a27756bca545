from __future__ import annotations

import pytest
import torch

from megatron_stppo.algorithm.ratio import check_offsets, segment_offsets


@pytest.mark.parametrize("offsets", [[1, 4], [0, 3], [0, 5], [0, 3, 2, 4], [-1, 0, 4]])
def test_offsets_start_at_0_never_decrease_and_end_at_the_number_of_tokens(offsets: list[int]) -> None:
    check_offsets("turns", torch.tensor([0, 2, 2, 4]), 4)
    check_offsets("turns", torch.tensor([0]), 0)
    with pytest.raises(ValueError, match=r"turns=\[.*\] must start at 0, never decrease and end at 4"):
        check_offsets("turns", torch.tensor(offsets), 4)


@pytest.mark.parametrize("offsets", [torch.tensor(0), torch.tensor([[0, 4]]), torch.tensor([])])
def test_offsets_are_a_vector_with_at_least_one_number(offsets: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="turns has shape"):
        check_offsets("turns", offsets, 4)


def test_at_most_8_offsets_are_shown() -> None:
    with pytest.raises(ValueError, match=r"=\[1, 1, 1, 1, 1, 1, 1, 1\] must"):
        check_offsets("turns", torch.ones(8).long(), 4)
    with pytest.raises(ValueError, match=r"=\[1, 1, 1, 1, 1, 1, 1, 1\]\.\.\. must"):
        check_offsets("turns", torch.ones(9).long(), 4)


def test_segments_are_tokens_turns_or_trajectories() -> None:
    turns, actions = torch.tensor([0, 1, 4]), torch.tensor([0, 4])
    assert segment_offsets("token", turns, actions) is None
    assert segment_offsets("turn", turns, actions) is turns
    assert segment_offsets("sequence", turns, actions) is actions
    with pytest.raises(ValueError, match="segments='word'"):
        segment_offsets("word", turns, actions)  # type: ignore[arg-type]
