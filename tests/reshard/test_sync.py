import pytest
import torch
import torch.distributed as dist

from megatron_stppo.model.spans import row_widths, serving_layouts, training_layouts
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.reshard.plan import build_plan
from megatron_stppo.reshard.staging import Copies, cast
from megatron_stppo.reshard.state import Resharder, State
from megatron_stppo.reshard.verify import ReshardError, checksum
from tests.ranks import run_ranks
from tests.reshard.pieces import apply, blank, checkpoint, cut, model_shape, padding_rows

WORLD, BUCKET = 4, 1 << 12


class Hook:
    """What happens before a bucket is packed; nothing unless told."""

    def __init__(self):
        self.action = lambda bucket: None

    def __call__(self, bucket):
        self.action(bucket)


def case(shape, layout, serving, wire=torch.float32):
    """This rank's resharder with its tensors, and what they must become."""
    widths, held, hook = row_widths(shape), checkpoint(shape), Hook()
    train, engine = training_layouts(shape, layout), serving_layouts(shape, WORLD, serving)
    sources = {rank: cut(spans, held, widths) for rank, spans in train.items()}
    expected = {rank: blank(spans, widths) for rank, spans in engine.items()}
    apply(build_plan(train, engine, widths), sources, expected)
    rank = dist.get_rank()
    for rows in padding_rows(engine[rank], expected[rank]):
        rows.zero_()
    target = {name: tensor.to(wire) for name, tensor in blank(engine[rank], widths).items()}
    resharder = Resharder(sources[rank], target, train, engine, widths, bucket_bytes=BUCKET, on_bucket=hook)
    return resharder, hook, target, {name: t.to(wire) for name, t in expected[rank].items()}


def equal(target, expected):
    return all(torch.equal(target[name], expected[name]) for name in expected)


def refused(resharder):
    with pytest.raises(ReshardError) as caught:
        resharder.published()
    return str(caught.value)


def sync_all_topologies():
    for tied, layout, serving, wire in (
        (False, Layout(2, 2, 1), 1, torch.float32),
        (True, Layout(1, 2, 2), 2, torch.bfloat16),
        (False, Layout(4, 1, 1), 2, torch.float32),
        (True, Layout(1, 1, 4), 4, torch.float64),
    ):
        shape = model_shape(tied=tied, qkv_bias=not tied, vocab=1000)
        resharder, _, target, expected = case(shape, layout, serving, wire)
        assert "no sync has run" in refused(resharder)
        reports = [resharder.sync(version) for version in (7, 8)]
        assert equal(target, expected), (layout, serving)
        assert resharder.published() == 8
        assert reports[0].checksum == reports[1].checksum and reports[0].compared == reports[1].compared > 0
        dist.barrier()


def fail_in_bucket_3():
    resharder, hook, target, expected = case(model_shape(vocab=1000), Layout(2, 2, 1), 1)
    resharder.sync(1)

    def fail(bucket):
        if bucket == 3 and dist.get_rank() == 2:
            raise OSError("device fell off")

    hook.action = fail
    with pytest.raises(ReshardError, match="rank 2: OSError: device fell off"):
        resharder.sync(2)
    assert resharder.state is State.POISONED
    said = refused(resharder)
    hook.action = lambda bucket: None
    resharder.sync(2)
    assert resharder.published() == 2 and equal(target, expected)
    return said


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
    with pytest.raises(ReshardError, match=r"ranks \[1\] planned another reshard"):
        Resharder(source, target, train, engine, widths)
    train = training_layouts(shape, Layout(2, 1, 1))
    source, name = cut(train[rank], checkpoint(shape), widths), "decoder.layers.1.mlp.linear_fc1.weight"
    if rank == 1:
        source[name] = source[name][:-1]
    with pytest.raises(ReshardError, match=rf"^rank 1: source {name} has shape \(11, 8\)"):
        Resharder(source, target, train, engine, widths)
    if rank == 1:
        del source[name]
    with pytest.raises(ReshardError, match=rf"^rank 1: source tensors and layout name .*{name}"):
        Resharder(source, target, train, engine, widths)
    return True


def every_case():
    sync_all_topologies()
    return fail_in_bucket_3(), corrupt_a_byte_after_it_arrived()


def test_a_sync_equals_the_plan_carried_out_by_hand_and_an_error_refuses_generation_until_a_whole_sync():
    for failed, corrupted in run_ranks(every_case, WORLD):
        assert "poisoned" in failed and "sync to version 2 failed" in failed and "OSError" in failed
        assert "poisoned" in corrupted and "arrived changed" in corrupted


def test_ranks_that_plan_differently_or_hold_other_tensors_than_planned_stop_together():
    assert run_ranks(disagree, 2) == [True, True]


def test_checksum_sees_a_changed_byte_an_exchange_and_a_length():
    rows = torch.arange(1000, dtype=torch.bfloat16)[: 7 * 13].view(7, 13)
    total = checksum(rows)
    assert checksum(rows.clone()) == total
    for element in (0, 45, 90):  # 91 elements of 2 bytes: the last ones lie in no whole word
        changed = rows.clone()
        changed.view(-1).view(torch.uint8)[2 * element] ^= 1
        assert checksum(changed) != total
    assert checksum(rows[[1, 0, 2, 3, 4, 5, 6]]) != total
    assert checksum(rows[:, :12]) != checksum(rows[:, 1:])
    assert checksum(torch.zeros(8)) != checksum(torch.zeros(9))
    blocks = torch.zeros(2, 1 << 18, dtype=torch.int64)
    blocks[0, 3] = 1
    assert checksum(blocks) != checksum(blocks.flip(0))
    assert checksum(blocks[:, ::2]) == checksum(blocks[:, ::2].contiguous())  # a view sums like its copy


def test_a_cast_for_the_checksum_has_the_bits_of_the_copy_and_other_types_are_copied_too():
    source = torch.arange(12 * 40, dtype=torch.int32).view(12, 40).mul(9_000_001).view(torch.float32)
    source[3, 5:30] = float("nan")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        target = torch.zeros(12, 60, dtype=dtype)
        Copies([(source[:, 3:37], target[:, 9:43])])()
        assert torch.equal(
            cast(source[:, 3:37], dtype).view(torch.uint8), target[:, 9:43].contiguous().view(torch.uint8)
        )
        assert not target[:, :9].any() and not target[:, 43:].any()
