"""On meta tensors, which `plan` uses, the ops give tensors of the right shape and run no kernel."""

import pytest
import torch

from megatron_stppo import ops
from megatron_stppo.ops import extension

T, V, H = 40, 100, 16


@pytest.fixture(autouse=True)
def meta(monkeypatch):
    """Make new tensors meta tensors, without the extension."""
    monkeypatch.setattr(extension, "run", None)
    monkeypatch.setattr(extension, "_csrc", None)
    with torch.device("meta"):
        yield


def all_have(tensors, shape, dtype=torch.float32):
    return all((tuple(x.shape), x.dtype, x.is_meta) == (shape, dtype, True) for x in tensors)


def test_log_probs_have_their_shape():
    logits = torch.empty(T, V, dtype=torch.bfloat16, requires_grad=True)
    hidden, weight = (torch.empty(n, H, requires_grad=True) for n in (T, V))
    target = torch.empty(T, dtype=torch.int64)

    def loss(chunk):
        return chunk.logprob.sum(), chunk.logprob.detach().sum().reshape(1)

    rows = ops.vocab_logprob(logits, target), ops.linear_logprob(hidden, weight, target, [0, 30, T])
    assert all(all_have(out, (T,)) for out in rows)
    (of_logits,) = torch.autograd.grad(rows[0][0].sum(), logits)
    assert all_have([of_logits], (T, V), torch.bfloat16)
    with torch.no_grad():
        total, record, logprob = ops.linear_loss(hidden, weight, target, [0, 30, T], loss)
    assert all_have([total], ()) and all_have([record], (1,)) and all_have([logprob], (T,))


@pytest.mark.parametrize("by_turn", [True, False])
def test_a_surrogate_has_its_shape(by_turn):
    logprob, old, advantage = (torch.empty(T) for _ in range(3))
    logprob.requires_grad_()
    offsets = torch.empty(5, dtype=torch.int64)
    out = ops.clipped_surrogate(logprob, old, advantage, offsets if by_turn else None, with_bias=True)
    assert all_have([out.ratio], (4 if by_turn else T,)) and all_have([out.grad_T, out.bias_T], (T,))
    assert all_have([out.objective, out.clipped, out.logit_grad_sq], ())
    assert all_have(torch.autograd.grad(out.objective, logprob), (T,))


def test_copies_and_checksums_run_no_kernel():
    sources, targets = [torch.empty(4, 5)], [torch.empty(4, 5, dtype=torch.bfloat16)]
    ops.BucketCopy(sources, targets)()
    assert all_have([ops.checksum(sources[0])], (), torch.int64)
    given = [*sources, torch.empty(2, 2, 2)]  # the kernel does not support three dimensions
    assert all_have([ops.BucketChecksum(given, [torch.bfloat16] * 2)()], (2,), torch.int64)
