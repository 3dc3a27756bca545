"""vocab_logprob gives the same bits in every repeat, with any number of threads and any neighbouring rows.

Because of this, the ratio in the first minibatch of an iteration is exactly 1, although the old log-probs
were computed in other microbatches.
"""

import pytest
import torch

from tests.ops.draws import logprob_and_gradient, rows, same_bits

pytestmark = pytest.mark.usefixtures("device")
SHAPES = [(301, torch.float32), (301, torch.bfloat16), (1003, torch.float32), (1003, torch.bfloat16)]
SHAPES += [(4096, torch.float32), (4096, torch.bfloat16)]


def draw(count, columns, dtype):
    logits, target = rows(count, columns)
    target[count // 2] = -100
    return logits.to(dtype), target


@pytest.mark.parametrize(("columns", "dtype"), SHAPES)
def test_100_repeats_are_bitwise_equal(columns, dtype):
    given = draw(8, columns, dtype)
    first = logprob_and_gradient(*given)
    assert all(same_bits(first, logprob_and_gradient(*given)) for _ in range(99))


@pytest.mark.row_alone
@pytest.mark.parametrize(("columns", "dtype"), SHAPES)
def test_the_bits_of_a_row_do_not_depend_on_the_rows_before_and_after_it(columns, dtype):
    logits, target = draw(40, columns, dtype)
    together = logprob_and_gradient(logits, target)
    for first in range(1, 18):
        for last in (first + 1, first + 5, 40):
            part = slice(first, last)
            alone = logprob_and_gradient(logits[part], target[part])  # a view: it starts at an odd address
            copied = logprob_and_gradient(logits[part].clone(), target[part].clone())
            whole = [x[part] for x in together]
            assert same_bits(alone, whole) and same_bits(copied, whole)


@pytest.mark.parametrize(("columns", "dtype"), SHAPES)
def test_threads_change_no_bit(columns, dtype):
    given = draw(50, columns, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(logprob_and_gradient(*given))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])
