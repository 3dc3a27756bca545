from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_stppo.ops import BucketChecksum
from megatron_stppo.parallel.cpu_platform import FACTORIES
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.plan.meter import tensors_in
from megatron_stppo.weights.reshard.plan import RowCopy
from megatron_stppo.weights.reshard.resharder import Resharder, ReshardError
from megatron_stppo.weights.reshard.staging import Copies, Move
from megatron_stppo.weights.sharding.low_rank import (
    adapted,
    adapter_key,
    adapter_shapes,
    adapter_spans,
    low_rank_terms,
)
from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts, training_layouts, widths_of
from tests import stand_in_gpu
from tests.ranks import run_ranks
from tests.weights.reshard.pieces import apply, blank, build_plan, checkpoint, cut, model_shape, padding_rows

WORLD, BUCKET = 4, 1 << 12


class Hook:
    """Called before a bucket is packed. A test may replace it."""

    def __init__(self):
        self.action = lambda bucket: None

    def __call__(self, bucket):
        self.action(bucket)


def case(shape, layout, serving, wire=torch.float32, over_host=False):
    """Return this rank's resharder with its tensors, and their expected values."""
    widths, held, hook = row_widths(shape), checkpoint(shape), Hook()
    train, engine = training_layouts(shape, layout), serving_layouts(shape, WORLD, serving)
    sources = {rank: cut(spans, held, widths) for rank, spans in train.items()}
    expected = {rank: blank(spans, widths) for rank, spans in engine.items()}
    apply(build_plan(train, engine, widths), sources, expected)
    rank = dist.get_rank()
    for rows in padding_rows(engine[rank], expected[rank]):
        rows.zero_()
    target = {name: tensor.to(wire) for name, tensor in blank(engine[rank], widths).items()}
    settings = {"bucket_bytes": BUCKET, "on_bucket": hook, "over_host": over_host}
    resharder = Resharder(sources[rank], target, train, engine, widths, **settings)
    kept = [copy for group in resharder._exchanges[-1]._groups for copy in group]
    assert all(rank in (copy.source_rank, copy.target_rank) for copy in kept), "not those of the cluster"
    return resharder, hook, target, {name: t.to(wire) for name, t in expected[rank].items()}


def equal(target, expected):
    return all(torch.equal(target[name], expected[name]) for name in expected)


def refused(resharder):
    with pytest.raises(ReshardError) as caught:
        resharder.published()
    return str(caught.value)


def sync_all_topologies():
    for over_host, (tied, layout, serving, wire) in product(
        (False, True),
        (
            (False, Layout(2, 2, 1), 1, torch.float32),
            (True, Layout(1, 2, 2), 2, torch.bfloat16),
            (False, Layout(4, 1, 1), 2, torch.float32),
            (True, Layout(1, 1, 4), 4, torch.float64),
        ),
    ):
        shape = model_shape(family="qwen3" if tied else "qwen2", tied=tied, vocab=1000)
        resharder, _, target, expected = case(shape, layout, serving, wire, over_host)
        assert "no sync has run" in refused(resharder)
        reports = [resharder.sync(version) for version in (7, 8)]
        assert equal(target, expected), (layout, serving)
        assert resharder.published() == 8
        assert reports[0].checksum == reports[1].checksum and reports[0].compared == reports[1].compared > 0
        dist.barrier()


def merge_adapters():
    """The sums of small integers are exact in float32, whichever rows are merged together."""
    targets, r, scale = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"), 2, 3.0
    for layout, serving, over_host in ((Layout(2, 2, 1), 1, False), (Layout(4, 1, 1), 2, True)):
        shape = model_shape(vocab=1000, tied=True)
        held, small = checkpoint(shape), adapter_shapes(shape, r, targets)
        for number, (key, size) in enumerate(small.items()):
            held[key] = torch.arange(size[0] * size[1]).add(number).remainder(7).sub(3).view(size).float()
        widths = row_widths(shape) | widths_of(shape, small)
        train, engine = training_layouts(shape, layout), serving_layouts(shape, WORLD, serving)
        rank = dist.get_rank()
        source = cut(train[rank], held, widths)
        parameters = cut(adapter_spans(train[rank], r, shape.hidden, targets), held, widths)
        terms = low_rank_terms(parameters, train[rank], r, targets, scale)
        for key in adapted(shape, targets):
            held[key] = (
                held[key] + scale * held[adapter_key(key, "lora_B")] @ held[adapter_key(key, "lora_A")]
            )
        target = blank(engine[rank], widths)
        settings = {"bucket_bytes": BUCKET, "over_host": over_host}
        resharder = Resharder(source, target, train, engine, widths, terms, **settings)
        report = resharder.sync(0)
        expected = cut(engine[rank], held, widths)
        for rows in padding_rows(engine[rank], expected):
            rows.zero_()
        assert equal(target, expected), layout
        packed = resharder.pack() if over_host else None
        assert report.compared > 0 and resharder.sync(1, packed).checksum == report.checksum


def fail_in_bucket_3():
    resharder, hook, target, expected = case(model_shape(vocab=1000), Layout(2, 2, 1), 1)
    resharder.sync(1)

    def fail(bucket):
        if bucket == 3 and dist.get_rank() == 2:
            raise OSError("device fell off")

    hook.action = fail
    with pytest.raises(ReshardError, match="rank 2: OSError: device fell off"):
        resharder.sync(2)
    said = refused(resharder)
    hook.action = lambda bucket: None
    resharder.sync(2)
    assert resharder.published() == 2 and equal(target, expected)
    return said


def fail_to_allocate():
    """A rank without buffers cannot exchange bytes, and a rank without sums cannot compare them."""
    resharder, _, target, expected = case(model_shape(vocab=1000), Layout(2, 2, 1), 1)
    for place in ("execute.Staging", "staging.Checks.sum"):
        error = torch.OutOfMemoryError(place) if dist.get_rank() == 2 else None
        with ExitStack() as stack:
            if error is not None:
                stack.enter_context(mock.patch(f"megatron_stppo.weights.reshard.{place}", side_effect=error))
            stack.enter_context(pytest.raises(ReshardError, match=f"rank 2: OutOfMemoryError: {place}"))
            resharder.sync(1)
        refused(resharder)
    resharder.sync(1)
    assert equal(target, expected)
    assert Resharder({}, {}, {}, {}, {}).sync(0).bytes_moved == 0, "a rank may have no tensors"


def corrupt_a_byte_after_it_arrived():
    resharder, hook, target, expected = case(model_shape(vocab=1000), Layout(2, 2, 1), 1)
    last = resharder.sync(1).buckets - 1
    name = "model.embed_tokens.weight"  # its first rows come to rank 1 from rank 0, in the first bucket
    target[name].fill_(-1)

    def corrupt(bucket):
        if bucket == last and dist.get_rank() == 1:
            assert torch.equal(target[name][0], expected[name][0])  # it has arrived by now
            target[name].view(-1).view(torch.uint8)[5] ^= 4

    hook.action = corrupt
    with pytest.raises(
        ReshardError, match=rf"^rank 1: ReshardError: 1 copies arrived changed, first {name} row"
    ):
        resharder.sync(2)
    return refused(resharder)


def disagree():
    shape, widths = model_shape(), row_widths(model_shape())
    layout = Layout(2, 1, 1) if dist.get_rank() == 0 else Layout(1, 1, 2)
    train, engine = training_layouts(shape, layout), serving_layouts(shape, 2, 1)
    rank = dist.get_rank()
    source, target = cut(train[rank], checkpoint(shape), widths), blank(engine[rank], widths)
    with pytest.raises(ReshardError, match=r"ranks \[1\] planned a different reshard"):
        Resharder(source, target, train, engine, widths)
    train = training_layouts(shape, Layout(2, 1, 1))
    source, name = cut(train[rank], checkpoint(shape), widths), "decoder.layers.1.mlp.linear_fc1.weight"
    if rank == 1:
        source[name] = source[name][:-1]
    with pytest.raises(ReshardError, match=rf"^rank 1: source {name} has shape \(11, 8\)"):
        Resharder(source, target, train, engine, widths)
    if rank == 1:
        del source[name]
    with pytest.raises(
        ReshardError, match=rf"^rank 1: source tensors and layout have different names: .*{name}"
    ):
        Resharder(source, target, train, engine, widths)
    return True


class Refusing(TorchDispatchMode):
    """Refuses operations on tensors of a GPU (tests/stand_in_gpu.py)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = (*args, *(kwargs or {}).values())
        assert not any(x.is_meta for x in tensors_in(given)), func
        return func(*args, **(kwargs or {}))


def send_from_a_thread():
    """Rank 0 sends a copy to rank 1 in a thread. Both have a GPU."""
    for name in FACTORIES:  # without the CPU platform, which takes the GPU for the host
        setattr(torch, name, getattr(torch, name).__wrapped__)
    stand_in_gpu.install()
    rank, shape = dist.get_rank(), model_shape(vocab=1000)
    train, engine = training_layouts(shape, Layout()), {1: serving_layouts(shape, 1, 1)[0]}
    widths, gpu = row_widths(shape), stand_in_gpu.StandInGpu()
    with gpu:
        cuts = [cut(spans, checkpoint(shape), widths) for spans in (train[0], engine[1])]
        source, target = ({n: x.to("cuda") for n, x in side.items()} for side in cuts)
        sides = ({}, target) if rank else (source, {})
        resharder = Resharder(*sides, train, engine, widths, bucket_bytes=BUCKET, over_host=True)
        resharder.sync(1)
        packed = None if rank else resharder.pack()
    waits = gpu.waits.copy()

    def send():
        with gpu if rank else Refusing():
            return resharder.sync(2, packed).version

    with ThreadPoolExecutor() as threads:
        assert threads.submit(send).result() == 2
    assert (gpu.waits == waits) == (rank == 0)


def every_case():
    sync_all_topologies()
    merge_adapters()
    fail_to_allocate()
    return fail_in_bucket_3(), corrupt_a_byte_after_it_arrived()


def test_a_sync_equals_the_plan_and_after_an_error_generation_needs_a_complete_sync():
    for failed, corrupted in run_ranks(every_case, WORLD):
        assert "poisoned" in failed and "sync to version 2 failed" in failed and "OSError" in failed
        assert "poisoned" in corrupted and "arrived changed" in corrupted


def test_the_thread_that_sends_a_copy_uses_no_gpu():
    run_ranks(send_from_a_thread, 2)


def test_ranks_with_different_plans_or_unplanned_tensors_raise_together():
    assert run_ranks(disagree, 2) == [True, True]


def test_other_types_are_copied_too_and_checksums_are_of_the_copied_bits():
    source = torch.arange(12 * 40, dtype=torch.int32).view(12, 40).mul(9_000_001).view(torch.float32)
    source[3, 5:30] = float("nan")
    copy = RowCopy(0, "source", 0, 0, "target", 0, 0, 12, "key")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        target = torch.zeros(12, 60, dtype=dtype)
        Copies([Move(copy, source[:, 3:37], target[:, 9:43])])()
        sums = BucketChecksum([source[:, 3:37], target[:, 9:43]], [dtype, dtype])()
        assert sums[0] == sums[1]
        assert not target[:, :9].any() and not target[:, 43:].any()
