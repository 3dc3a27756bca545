"""The CPU ops as older processors run them: with AVX2, and with the baseline of x86-64.

GCC's clones are chosen by the processor, so the others would never run here. Each is compiled separately.
"""

import platform
import sys

import pytest
import torch

from megatron_stppo import ops
from megatron_stppo.ops import extension
from tests.csrc.throwaway import build_emulated_cuda, for_instruction_set, load
from tests.once import once
from tests.ops.draws import logprob_and_gradient, normal, offsets_of, rows, same_bits, three, uniform

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="clones are made on x86-64 Linux only"
)


@pytest.fixture(scope="module", params=["x86-64-v3", pytest.param("x86-64", marks=pytest.mark.long)])
def older(request, tmp_path_factory):
    if request.param == "x86-64-v3" and "AVX2" not in torch.backends.cpu.get_cpu_capability().replace(
        "512", "2"
    ):
        pytest.skip("this processor has no AVX2")
    if request.param == "x86-64-v3":  # both builds compile the bindings, which takes longest
        return load("emulated", once(tmp_path_factory, "emulated", build_emulated_cuda))
    return for_instruction_set(request.param, "older", tmp_path_factory.mktemp("older"))


def run(monkeypatch, module, evaluate):
    """Return (the result of `module`, the result of the installed extension)."""
    monkeypatch.setenv("STPPO_OPS", "extension")
    expected = evaluate()
    monkeypatch.setattr(extension, "_csrc", module)
    actual = evaluate()
    assert same_bits(actual, evaluate())
    return actual, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [5, 33, 1003, 5000])
def test_vocab_logprob_agrees_between_processors(columns, dtype, older, monkeypatch):
    logits, target = rows(9, columns)
    logits[:, columns // 2] = -torch.inf
    for temperature in (1.0, 0.7):
        settings = {"temperature": temperature}
        actual, expected = run(
            monkeypatch, older, lambda s=settings: logprob_and_gradient(logits.to(dtype), target, **s)
        )
        torch.testing.assert_close(actual[:3], expected[:3], rtol=1e-5, atol=1e-5)
        relative = 1e-4 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(actual[3], expected[3], rtol=relative, atol=1e-6)


@pytest.mark.parametrize("by_turn", [True, False])
def test_clipped_surrogate_agrees_between_processors(by_turn, older, monkeypatch):
    lengths = [1, 2, 3, 4, 0, 33, 700, 5000, *[5] * 50]
    total, cut = sum(lengths), offsets_of(*lengths) if by_turn else None
    settings = {"weight": uniform(total), "sum_p_sq": uniform(total, seed=2), "with_bias": True}
    actual, expected = run(monkeypatch, older, lambda: ops.clipped_surrogate(*three(total), cut, **settings))
    for name in actual._fields:
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), rtol=2e-6, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_and_their_checksums_are_the_same_on_every_processor(dtype, older, monkeypatch):
    source = normal(9, 5000)
    source[2] = torch.nan

    def evaluate():
        target = torch.empty(9, 4999, dtype=dtype)
        ops.BucketCopy([source[:, 1:]], [target])()
        views = [source[:, 1:], target, target[:, 3:]]
        return target, ops.BucketChecksum(views, [dtype, dtype, torch.float32])()

    actual, expected = run(monkeypatch, older, evaluate)
    assert same_bits(actual, expected)
