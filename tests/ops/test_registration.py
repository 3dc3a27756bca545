"""The ops are registered with torch.library: fake and meta tensors get shapes and devices, no kernel runs."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron_stppo import ops
from megatron_stppo.ops import extension
from tests.ops.draws import integers, normal, offsets_of, three, uniform

REGISTERED = torch.ops.megatron_stppo
T, V, H, LENGTHS = 40, 100, 16, (8, 0, 30, 2)
INPUTS = {
    "segment_sums": lambda: (*three(T), None, 0.5, offsets_of(*LENGTHS)),
    "clipped_surrogate": lambda: (
        *(*three(T), uniform(T), 0.0, offsets_of(*LENGTHS)),
        *(0.2, 0.2, None, "mean", uniform(T), True, None),
    ),
    "vocab_statistics": lambda: (normal(T, V), *shard()),
    "vocab_merge": lambda: (
        REGISTERED.vocab_statistics(normal(T, V), *shard())[None],
        integers(V - 3, T),
        -100,
    ),
    "vocab_gradient": lambda: (
        *(normal(T, V), *shard(), REGISTERED.vocab_merge(*INPUTS["vocab_merge"]())),
        *(normal(T), None, None, torch.empty(T, V)),
    ),
    "checksum": lambda: (normal(3, 5), torch.bfloat16),
}


def shard():
    """Return target, temperature of rows, of all rows, vocab_start, valid columns and ignore_index."""
    return integers(V - 3, T), None, 0.7, 0, V - 3, -100


@pytest.mark.parametrize("name", list(INPUTS))
def test_schema_and_fake_outputs_are_those_of_the_kernel(name):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(REGISTERED, name).default, INPUTS[name](), test_utils=checks)


@pytest.fixture(params=["cuda", "cpu"])
def fake(request, monkeypatch):
    """A device of fake tensors, without the extension. torch built for CPUs has no gradients on "cuda"."""
    monkeypatch.setattr(extension, "run", None)
    monkeypatch.setattr(extension, "_csrc", None)
    with FakeTensorMode(), torch.device(request.param):
        yield request.param


def all_have(tensors, shape, dtype, device):
    return all((tuple(x.shape), x.dtype, x.device.type) == (shape, dtype, device) for x in tensors)


def test_fake_log_probs_have_shape_and_device(fake):
    graded = fake == "cpu" or torch.cuda.is_available()
    logits = torch.empty(T, V, dtype=torch.bfloat16, requires_grad=graded)
    hidden, weight = (torch.empty(n, H, requires_grad=graded) for n in (T, V))
    target = torch.empty(T, dtype=torch.int64)

    def loss(chunk):
        return chunk.logprob.sum(), chunk.logprob.detach().sum().reshape(1)

    rows = ops.vocab_logprob(logits, target), ops.linear_logprob(hidden, weight, target, [0, 30, T])
    assert all(all_have(out, (T,), torch.float32, fake) for out in rows)
    total, record, logprob = ops.linear_loss(hidden, weight, target, [0, 30, T], loss)
    assert all_have([total], (), torch.float32, fake) and all_have([record], (1,), torch.float32, fake)
    assert all_have([logprob], (T,), torch.float32, fake)
    if graded:
        (of_logits,) = torch.autograd.grad(rows[0][0].sum(), logits)
        assert all_have([of_logits], (T, V), torch.bfloat16, fake)
        of_hidden, of_weight = torch.autograd.grad(total, (hidden, weight))
        assert all_have([of_hidden], (T, H), torch.float32, fake)
        assert all_have([of_weight], (V, H), torch.float32, fake)


@pytest.mark.parametrize("by_turn", [True, False])
def test_a_fake_surrogate_has_shape_and_device(fake, by_turn):
    graded = fake == "cpu" or torch.cuda.is_available()
    logprob, old, advantage = (torch.empty(T) for _ in range(3))
    logprob.requires_grad_(graded)
    offsets = torch.empty(5, dtype=torch.int64)
    out = ops.clipped_surrogate(logprob, old, advantage, offsets if by_turn else None, with_bias=True)
    assert all_have([out.ratio], (4 if by_turn else T,), torch.float32, fake)
    assert all_have([out.grad_T, out.bias_T], (T,), torch.float32, fake)
    assert all_have([out.objective, out.clipped, out.logit_grad_sq], (), torch.float32, fake)
    if graded:
        assert all_have(torch.autograd.grad(out.objective, logprob), (T,), torch.float32, fake)


def test_fake_copies_and_checksums_run_no_kernel(fake):
    sources, targets = [torch.empty(4, 5)], [torch.empty(4, 5, dtype=torch.bfloat16)]
    ops.BucketCopy(sources, targets)()
    assert all_have([ops.checksum(sources[0])], (), torch.int64, fake)
    given = [*sources, torch.empty(2, 2, 2)]  # the kernel does not support three dimensions
    assert all_have([ops.BucketChecksum(given, [torch.bfloat16] * 2)()], (2,), torch.int64, fake)


def test_a_dispatch_mode_gets_the_ops_by_name_and_the_same_bits():
    seen = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    given, target = (*three(T), offsets_of(*LENGTHS)), integers(V, T)
    expected = [*ops.clipped_surrogate(*given)[:2], *ops.vocab_logprob(normal(T, V), target)]
    with Names():
        actual = [*ops.clipped_surrogate(*given)[:2], *ops.vocab_logprob(normal(T, V), target)]
    assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))
    for name in ("clipped_surrogate", "vocab_statistics", "vocab_merge"):
        assert f"megatron_stppo.{name}.default" in seen
