"""Ops on a GPU with other streams, and in CUDA graphs that are replayed."""

import pytest
import torch

from megatron_stppo import ops
from tests.ops.draws import offsets_of, rows, same_bits, three, uniform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and graphs are a GPU's")
LENGTHS = [3, 0, 700, 33_000, 1, 5000]


def inputs(seed):
    total = sum(LENGTHS)
    logits, _ = rows(64, 1000, seed=seed)
    return [*three(total, seed=seed), uniform(total, seed=seed), logits]


@torch.no_grad()
def evaluate(given, target, offsets):
    new, old, advantage, weight, logits = given
    out = ops.clipped_surrogate(new, old, advantage, offsets, weight=weight, with_bias=True)
    copied = torch.empty(logits.shape, dtype=torch.bfloat16)
    ops.BucketCopy([logits], [copied])()
    return [*out, *ops.vocab_logprob(logits, target), copied]


@pytest.fixture
def cuda(implementation):
    if implementation == "torch":
        pytest.skip("the fallback reads flags back to the host")
    with torch.device("cuda"):
        yield


def test_another_stream_gives_the_same_bits(cuda):
    target, offsets, given = rows(64, 1000)[1], offsets_of(*LENGTHS), inputs(0)
    expected = evaluate(given, target, offsets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = evaluate(given, target, offsets)
    torch.cuda.synchronize()
    assert same_bits(found, expected)


def test_a_captured_graph_replays_on_new_inputs(cuda):
    target, offsets, given = rows(64, 1000)[1], offsets_of(*LENGTHS), inputs(0)
    evaluate(given, target, offsets)  # the first call makes permanent allocations
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = evaluate(given, target, offsets)
    for seed in (1, 2):
        for tensor, value in zip(given, inputs(seed), strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(found, evaluate(given, target, offsets))
