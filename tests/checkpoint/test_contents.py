"""Rectangles of a range; the check of a plan. Whole checkpoints: tests/training/update/test_relayout.py."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_stppo.checkpoint.contents import check_coverage, rectangles


def test_a_range_is_the_end_of_a_row_whole_rows_and_the_beginning_of_a_row() -> None:
    assert list(rectangles((4, 3), 2, 10)) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]


def test_a_range_within_a_row_is_one_rectangle() -> None:
    assert list(rectangles((4, 5), 6, 9)) == [((1, 1), (1, 3))]


def test_an_empty_range_and_one_that_ends_before_it_begins_have_no_rectangle() -> None:
    assert list(rectangles((4, 5), 7, 7)) == []
    assert list(rectangles((4, 5), 12, 3)) == []


def test_rectangles_cover_every_range_once_and_in_the_order_of_memory() -> None:
    draw = random.Random(0)
    for _ in range(500):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
        elements = torch.arange(math.prod(shape)).view(shape)
        start, end = sorted(draw.randint(0, elements.numel()) for _ in range(2))
        found = list(rectangles(shape, start, end))
        assert len(found) <= 2 * len(shape) - 1
        covered = []
        for offset, size in found:
            part = elements[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
            assert part.shape == torch.Size(size)
            covered += part.flatten().tolist()
        assert covered == list(range(start, end))


@pytest.mark.parametrize("planned", [9, 12, 13])
def test_chunks_with_too_few_or_too_many_elements_are_errors(planned: int) -> None:
    chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((1, n))) for n in (5, planned - 5)]
    plan = Metadata({"moment": TensorStorageMetadata(TensorProperties(), torch.Size((4, 3)), chunks)})
    if planned == 12:
        check_coverage(plan)
        return
    with pytest.raises(ValueError, match=rf"moment of size \(4, 3\): its chunks have {planned} elements"):
        check_coverage(plan)
