import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_stppo.families.qwen3_next import KINDS, Hybrid
from megatron_stppo.families.qwen3_next.delta_net import DeltaNet
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.reshard.plan import PlanError, RowCopy, buckets, digest, lower_bound
from megatron_stppo.weights.sharding.hf_names import families, hf_shapes
from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts, training_layouts, whole_spans
from megatron_stppo.weights.sharding.tiles import PADDING, Span
from tests.weights.reshard.pieces import apply, blank, build_plan, checkpoint, cut, model_shape, padding_rows


@st.composite
def meshes(draw):
    """Draw a layout of at most 12 ranks, and a number of layers that its stages and chunks can divide."""
    tensor, pipeline, data, context = (
        draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2, 3], [1, 2], [1, 2])
    )
    virtual, first, last = 1, None, None
    if pipeline > 1:
        virtual = draw(st.sampled_from([1, 2]))
        first, last = (draw(st.sampled_from([None, None, virtual, 2 * virtual])) for _ in range(2))
    layout = Layout(tensor, pipeline, data, context, 1, virtual, first, last)
    layers = [n for n in range(1, 9) if layout.stage_sizes(n)]
    assume(layers and layout.world <= 12)
    return layout, draw(st.sampled_from(layers[:2]))


@st.composite
def models_and_layouts(draw):
    """Draw a model, a training layout and an engine size that megatron and vLLM both accept."""
    layout, layers = draw(meshes())
    tensor = layout.tensor
    serving = draw(st.sampled_from([s for s in (1, 2, 4, 8) if layout.world % s == 0]))
    kv_heads = draw(
        st.sampled_from([1, 2, 3, 4]).filter(
            lambda k: all(k % t == 0 or t % k == 0 for t in (tensor, serving))
        )
    )
    heads = kv_heads * draw(
        st.sampled_from([h for h in (1, 2, 4, 6, 8) if kv_heads * h % max(tensor, serving) == 0])
    )
    head_dim = draw(st.sampled_from([d for d in (1, 2, 4) if (heads + 2 * kv_heads) * d % tensor == 0]))
    family = draw(st.sampled_from(sorted(families())))
    kind, own = families()[family], {}
    expert = draw(st.sampled_from([1, 2])) if kind.mixture and layout.data == 2 else 1
    experts = expert * draw(st.sampled_from([1, 2, 3])) if kind.mixture else 0
    if issubclass(kind, Hybrid):
        groups = math.lcm(tensor, serving) * draw(st.sampled_from([1, 2]))
        own = {
            "kinds": tuple(draw(st.sampled_from(KINDS)) for _ in range(layers)),
            "delta_net": DeltaNet(8, groups, groups * draw(st.sampled_from([1, 3])), 2, 3, 4, kind.joined),
            "shared_ffn": 8 if kind.mixture else 0,
        }
    shape = model_shape(
        family=family,
        layers=layers,
        hidden=draw(st.integers(1, 5)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=8 * draw(st.integers(1, 2)),
        vocab=draw(st.integers(1, 600)),
        tied=draw(st.booleans()),
        experts=experts,
        **own,
    )
    spec = draw(st.sampled_from(["local", "transformer_engine"]))
    return shape, dataclasses.replace(layout, expert=expert), spec, serving


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models_and_layouts())
def test_every_element_is_written_once_with_the_value_that_the_checkpoint_has(case):
    shape, layout, spec, serving = case
    widths, held = row_widths(shape), checkpoint(shape)
    train, engine, whole = (
        training_layouts(shape, layout, spec=spec),
        serving_layouts(shape, layout.world, serving),
        whole_spans(shape, hf_shapes(shape)),
    )
    source = {rank: cut(spans, held, widths) for rank, spans in train.items()}

    straight = {rank: blank(spans, widths) for rank, spans in engine.items()}
    plan = build_plan(train, engine, widths)
    apply(plan, source, straight)
    for rank, spans in engine.items():
        for rows in padding_rows(spans, straight[rank]):
            assert (rows == -1).all()  # padding is never copied
            rows.fill_(77)
        expected = cut(spans, held, widths)
        assert all(torch.equal(straight[rank][name], expected[name]) for name in spans)

    exported = {0: blank(whole, widths)}
    apply(build_plan(train, {0: whole}, widths), source, exported)
    assert all(torch.equal(exported[0][key], held[key]) for key in held)

    imported = {rank: blank(spans, widths) for rank, spans in engine.items()}
    apply(build_plan({0: whole}, engine, widths), exported, imported)
    for rank, spans in engine.items():
        for rows in padding_rows(spans, imported[rank]):
            rows.fill_(77)
        assert all(torch.equal(imported[rank][name], straight[rank][name]) for name in spans)

    moved = sum(c.size * widths[c.hf_key] for c in plan if c.source_rank != c.target_rank)
    assert moved == lower_bound(train, engine, widths)


def mutate(layouts, rank, name, index, **change):
    """Change a span of a rank, and of its replicas: a layout is a function of the rank's coordinates."""
    spans = list(layouts[rank][name])
    spans[index] = spans[index]._replace(**change)
    changed = layouts[rank] | {name: tuple(spans)}
    return {other: changed if held == layouts[rank] else held for other, held in layouts.items()}


def test_a_rank_with_the_keys_of_another_group_of_heads_is_detected():
    """Four ranks share two groups: ranks 0 and 1 hold the first, 2 and 3 the second."""
    shape = model_shape(heads=8, kv_heads=2)
    train, engine = training_layouts(shape, Layout(1, 1, 4)), serving_layouts(shape, 4, 4)
    name, index = "model.layers.0.self_attn.qkv_proj.weight", 1
    held = [engine[rank][name][index].start for rank in range(4)]
    assert held == [0, 0, held[2], held[2]] and held[2] > 0
    with pytest.raises(PlanError, match=r"row \d+ of model.layers.0.self_attn.k_proj.weight is held 3 times"):
        build_plan(train, mutate(engine, 0, name, index, start=held[2]), row_widths(shape))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models_and_layouts(), st.data())
def test_one_changed_span_is_detected(case, data):
    shape, layout, spec, serving = case
    train, engine = (
        training_layouts(shape, layout, spec=spec),
        serving_layouts(shape, layout.world, serving),
    )
    side = data.draw(st.sampled_from([train, engine]))
    rank, name = data.draw(st.sampled_from([(rank, name) for rank in side for name in side[rank]]))
    spans = side[rank][name]
    index = data.draw(st.sampled_from([i for i, span in enumerate(spans) if span.hf_key] or [-1]))
    assume(index >= 0)
    span, others = spans[index], [s.hf_key for s in spans if s.hf_key not in ("", spans[index].hf_key)]
    field, value = data.draw(
        st.sampled_from(
            [(field, getattr(span, field) + by) for field in ("start", "size", "local") for by in (-1, 1)]
            + [("dim", 1 - span.dim), *(("hf_key", key) for key in others)]
        )
    )
    changed = mutate(side, rank, name, index, **{field: value})
    sides = (changed, engine) if side is train else (train, changed)
    with pytest.raises(PlanError):
        build_plan(*sides, row_widths(shape))


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_gate_labelled_as_up_projection_is_detected_although_another_rank_holds_both(side):
    shape = model_shape()
    train, engine = training_layouts(shape, Layout(2, 1, 2)), serving_layouts(shape, 4, 2)
    up = {"hf_key": "model.layers.0.mlp.up_proj.weight"}
    if side == "source":
        train = mutate(train, 0, "decoder.layers.0.mlp.linear_fc1.weight", 0, **up)
    else:
        engine = mutate(engine, 3, "model.layers.0.mlp.gate_up_proj.weight", 0, **up)
    with pytest.raises(PlanError, match=r"rank \d holds .*up_proj.weight twice"):
        build_plan(train, engine, row_widths(shape))


def test_a_row_comes_from_its_own_rank_else_its_node_else_the_rank_that_sends_least():
    one_row = {"w": (Span("k", 0, 0, 1, 0),)}
    sources = {rank: one_row for rank in (0, 1, 2, 3)}

    def origins(targets, ranks_per_node):
        plan = build_plan(
            sources, {rank: one_row for rank in targets}, {"k": 1}, ranks_per_node=ranks_per_node
        )
        return [copy.source_rank for copy in plan]

    assert origins([3, 2], 2) == [3, 2]
    assert origins([4, 5, 6, 7], 8) == [0, 1, 2, 3]
    assert build_plan({1: one_row, 9: one_row}, {8: one_row}, {"k": 1})[0].source_rank == 9


def test_what_a_rank_has_sent_is_counted_in_elements_and_not_in_rows():
    held = {name: (Span(name, 0, 0, 1, 0),) for name in ("wide", "thin", "next")}
    copies = build_plan({0: held, 1: held}, {8: held}, {"wide": 10, "thin": 1, "next": 1})
    assert [copy.source_rank for copy in copies] == [0, 1, 1]


def test_tied_embedding_comes_from_the_first_stage_and_the_engine_has_no_head():
    shape = model_shape(tied=True)
    train, engine = training_layouts(shape, Layout(1, 2, 1)), serving_layouts(shape, 2, 1)
    copies = build_plan(train, engine, row_widths(shape))
    assert {c.source_rank for c in copies if c.hf_key == "model.embed_tokens.weight"} == {0}
    assert not any("lm_head" in c.hf_key or "output_layer" in c.source for c in copies)


def test_the_padding_of_a_vocabulary_of_1000_at_tensor_8_is_not_copied():
    shape = model_shape(heads=8, kv_heads=8, ffn=16, vocab=1000)
    spans = training_layouts(shape, Layout(8, 1, 1))[7]["embedding.word_embeddings.weight"]
    # megatron pads to 1024 = 8 * 128; the last rank has rows 896..999 and 24 rows of padding
    assert spans == (Span("model.embed_tokens.weight", 0, 896, 104, 0), Span(PADDING, 0, 0, 24, 104))


def test_the_digest_differs_between_layouts_and_is_repeatable():
    shape = model_shape()
    widths = row_widths(shape)

    def of(layout):
        return digest(build_plan(training_layouts(shape, layout), serving_layouts(shape, 4, 2), widths))

    assert of(Layout(2, 2, 1)) == of(Layout(2, 2, 1)) != of(Layout(2, 1, 2))


def test_buckets_hold_every_row_once_and_no_rank_exceeds_the_limit():
    shape = dataclasses.replace(model_shape(), vocab=3000)
    widths = row_widths(shape)
    plan = build_plan(training_layouts(shape, Layout(2, 2, 1)), serving_layouts(shape, 4, 2), widths)
    remote = [c for c in plan if c.source_rank != c.target_rank]
    groups = buckets(remote, lambda c: 4 * widths[c.hf_key], 16000)
    assert len(groups) > 3
    for group in groups:
        for end in ("source_rank", "target_rank"):
            for rank in range(4):
                assert sum(4 * widths[c.hf_key] * c.size for c in group if getattr(c, end) == rank) <= 16000

    def rows(copies):
        return sorted((c.target_rank, c.target, c.target_offset + i) for c in copies for i in range(c.size))

    assert rows(c for group in groups for c in group) == rows(remote)


def loads(sizes, limit):
    """Return the bytes of each group by source. Rank 2 i sends sizes[i] rows of 1 byte to rank 2 i + 1."""
    copies = [RowCopy(2 * i, "w", 0, 2 * i + 1, "w", 0, 0, size, "k") for i, size in enumerate(sizes)]
    groups = buckets(copies, lambda copy: 1, limit)
    return [
        [sum(c.size for c in group if c.source_rank == 2 * i) for i in range(len(sizes))] for group in groups
    ]


def test_copies_of_all_pairs_are_spread_over_all_groups():
    assert loads([16, 16], 8) == [[8, 8], [8, 8]]
    assert loads([16, 4], 8) == [[8, 2], [8, 2]]


def test_a_copy_is_split_into_eighths_of_the_limit_and_no_further():
    copy = RowCopy(0, "w", 0, 1, "w", 0, 0, 40, "k")
    parts = [c for group in buckets([copy], lambda _: 1, 64) for c in group]
    assert [(c.source_offset, c.size) for c in parts] == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8)]
    assert [len(group) for group in buckets([copy], lambda _: 1, 16)] == [8, 8, 4]


def test_copies_of_different_widths_are_spread_by_their_bytes():
    # Two pairs of ranks with two copies of 32 bytes each. Half of a pair's bytes come before its second copy.
    sizes = {"wide": (0, 8), "thin": (0, 32), "third": (2, 32), "fourth": (2, 32)}
    copies = [RowCopy(r, name, 0, r + 1, name, 0, 0, size, "k") for name, (r, size) in sizes.items()]
    (group,) = buckets(copies, lambda copy: 4 if copy.source == "wide" else 1, 256)
    assert [copy.source for copy in group] == ["wide", "third", "thin", "fourth"]


def test_planning_a_32b_model_on_16_ranks_takes_well_under_a_second_and_moves_half_of_it():
    shape = model_shape(layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600, vocab=151936)
    train, engine, widths = (
        training_layouts(shape, Layout(8, 2, 1)),
        serving_layouts(shape, 16, 8),
        row_widths(shape),
    )
    plan = build_plan(train, engine, widths)
    moved = sum(2 * c.size * widths[c.hf_key] for c in plan if c.source_rank != c.target_rank)
    total = sum(2 * c.size * widths[c.hf_key] for c in plan)
    assert total == pytest.approx(131.07e9, rel=1e-3)  # two whole copies of 65.5 GB
    assert moved / total == pytest.approx(0.5, abs=0.01)
