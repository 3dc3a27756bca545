"""The check that the chunks of a planned checkpoint make up its tensors."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_stppo.checkpoint.coverage import check_coverage, overlaps

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, size)
WHOLE = [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((0, 0), (1, 2)), ((3, 0), (1, 3))]  # of shape (4, 3)


def chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(*map(torch.Size, box))


def plan(size: tuple[int, ...], boxes: list[Box]) -> Metadata:
    chunks = [chunk(box) for box in boxes]
    return Metadata({"moment": TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)})


def test_chunks_that_make_up_the_tensor_pass() -> None:
    check_coverage(plan((4, 3), WHOLE))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (WHOLE[:-1], r"moment of size \(4, 3\): 3 elements are in no chunk"),
        ([*WHOLE, ((2, 1), (1, 1))], r"moment of size \(4, 3\): the chunk at .* overlap"),
        (
            [*WHOLE[:-1], ((3, 0), (2, 3))],
            r"moment of size \(4, 3\): the chunk at \(3, 0\) of size \(2, 3\) is not",
        ),
    ],
)
def test_a_missing_a_repeated_and_an_outer_chunk_are_errors(boxes: list[Box], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_coverage(plan((4, 3), boxes))


def test_the_pairs_that_overlap_are_those_of_a_comparison_of_all_pairs() -> None:
    draw = random.Random(0)
    some = 0
    for _ in range(300):
        boxes = []
        for _ in range(draw.randint(1, 8)):
            offset = tuple(draw.randint(0, 4) for _ in range(3))
            boxes.append((offset, tuple(draw.randint(1, 6 - start) for start in offset)))
        chunks = [chunk(box) for box in boxes]
        elements = torch.zeros(len(boxes), 6, 6, 6, dtype=torch.bool)
        for own, (offset, size) in zip(elements, boxes, strict=True):
            own[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))] = True
        expected = {
            frozenset((n, m))
            for n in range(len(boxes))
            for m in range(n)
            if (elements[n] & elements[m]).any()
        }
        number = {id(one): n for n, one in enumerate(chunks)}
        found = [frozenset((number[id(one)], number[id(other)])) for one, other in overlaps(chunks)]
        assert len(found) == len(set(found))
        assert set(found) == expected
        some += bool(expected)
    assert some > 50
