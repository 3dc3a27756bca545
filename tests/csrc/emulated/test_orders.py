"""The order in which blocks, warps and lanes run changes no bit: a missing barrier would show here."""

import ctypes

import pytest
import torch

from megatron_stppo import ops
from tests.ops.draws import logprob_and_gradient, normal, rows, same_bits
from tests.ops.test_surrogate_bits import by_token, mixed


def by_vocabulary():
    logits, target = rows(5, 6001)
    return logprob_and_gradient(logits, target, temperature=0.7)


def copies():
    source, targets = normal(30, 70), [torch.empty(30, 33, dtype=torch.bfloat16), torch.empty(30, 36)]
    ops.BucketCopy([source[:, 1:34], source[:, 34:]], targets)()
    return targets


def checksums():
    source = normal(30, 70)
    views, dtypes = [source[:, 1:34], source[:, 34:], source], [torch.bfloat16, torch.float32, torch.bfloat16]
    return ops.BucketChecksum(views, dtypes)()


CASES = [mixed, by_token, by_vocabulary, copies, checksums]


@pytest.mark.parametrize("evaluate", CASES)
def test_the_order_of_blocks_warps_and_lanes_changes_no_bit(evaluate, implementation, emulated):
    expected = evaluate()
    for seed in range(2, 8):
        ctypes.CDLL(emulated.__file__).emulator_set_order(seed)
        assert same_bits(expected, evaluate())


def test_a_copy_equals_torchs_copy():
    source = normal(30, 70)
    expected = [source[:, 1:34].bfloat16(), source[:, 34:]]
    assert same_bits(copies(), [x.contiguous() for x in expected])
