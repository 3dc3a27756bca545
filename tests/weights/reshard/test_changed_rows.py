"""Whole engines of plain tensors, whose adapters are merged or alone: which rows are copied when, and how
many bytes they take."""

import pytest
import torch
import torch.distributed as dist

from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.reshard.plan import lower_bound
from megatron_stppo.weights.reshard.resharder import Resharder, ReshardError
from megatron_stppo.weights.sharding.hf_names import hf_shapes
from megatron_stppo.weights.sharding.low_rank import (
    ServedAdapters,
    adapted,
    adapter_key,
    adapter_shapes,
    adapter_spans,
    low_rank_terms,
    scaled_terms,
    transfer,
)
from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts, training_layouts, widths_of
from tests.ranks import run_ranks
from tests.weights.reshard.pieces import blank, checkpoint, cut, model_shape, padding_rows

WORLD, SCALE, RANK = 4, 3.0, 2
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Numbers per layer of model_shape (hidden 8, queries 8, keys and values 4, ffn 12). A has 2 rows of the
# layer's input and B two columns of its output, so q has 2 * (8 + 8).
A_AND_B = {"q_proj": 32, "k_proj": 24, "v_proj": 24, "o_proj": 32, **dict.fromkeys(ALL[4:], 40)}
WEIGHTS = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64, **dict.fromkeys(ALL[4:], 96)}
LAYERS, FLOAT32 = 4, 4


class Case:
    """A rank of a trainer and of an engine, with the names of a ServedAdapters."""

    def __init__(self, layout, tensor, targets, alone, **sizes):
        self.shape, self.served = model_shape(vocab=1000, **sizes), ServedAdapters(RANK, targets, alone)
        small = adapter_shapes(self.shape, RANK, targets)
        self.held = checkpoint(self.shape)
        for number, (key, size) in enumerate(small.items()):
            numbers = torch.arange(size[0] * size[1]).add(number).remainder(7).sub(3)
            self.held[key] = numbers.view(size).float()  # sums of small integers are exact
        self.widths = row_widths(self.shape) | widths_of(self.shape, small)
        self.train = training_layouts(self.shape, layout)
        self.serving = serving_layouts(self.shape, WORLD, tensor)
        self.rows = transfer(self.shape, self.train, self.serving, self.served)
        self.rank = dist.get_rank()
        self.source = self.sources()
        self.engine = blank(self.rows.targets[self.rank], self.widths)
        spans = self.train[self.rank]
        terms = (
            scaled_terms(spans, targets, SCALE)
            if alone
            else low_rank_terms(self.source, spans, RANK, targets, SCALE)
        )
        self.sync = Resharder(self.source, self.engine, *self.rows[:3], terms, changed=self.rows.changed)

    def sources(self):
        spans = self.train[self.rank]
        adapters = adapter_spans(spans, RANK, self.shape.hidden, self.served.targets)
        return cut(spans, self.held, self.widths) | cut(adapters, self.held, self.widths)

    def change(self):
        """Change A and B, as an update does."""
        for key in adapter_shapes(self.shape, RANK, self.served.targets):
            self.held[key] = -self.held[key] if key.endswith("lora_A.weight") else self.held[key] + 1
        for name, tensor in self.sources().items():
            self.source[name].copy_(tensor)

    def expected(self):
        """Return what this rank's engine must hold."""
        held, serving, names = dict(self.held), self.serving[self.rank], self.served.targets
        for key in adapted(self.shape, names):
            a, b = (adapter_key(key, matrix) for matrix in ("lora_A", "lora_B"))
            if self.served.alone:
                held[b] = SCALE * held[b]
            else:
                held[key] = held[key] + SCALE * held[b] @ held[a]
        found = cut(self.rows.targets[self.rank], held, self.widths)
        for rows in padding_rows(serving, found):
            rows.zero_()
        return found

    def holds(self):
        expected = self.expected()
        return all(torch.equal(self.engine[name], expected[name]) for name in expected)


def copied(report):
    return report.bytes_moved + report.bytes_self


def every_case():
    for layout, tensor, targets, sizes in (
        (Layout(2, 2, 1), 1, ALL, {"tied": True}),
        (Layout(1, 2, 2), 2, ALL, {"family": "qwen2"}),
        (Layout(4, 1, 1), 4, ALL, {}),  # more ranks than heads of keys, which engines then repeat
        (Layout(1, 1, 4), 2, ("q_proj", "v_proj", "down_proj"), {}),
    ):
        for alone, numbers in ((True, A_AND_B), (False, WEIGHTS)):
            case = Case(layout, tensor, targets, alone, **sizes)
            everything = copied(case.sync.sync(0))
            assert case.holds(), (layout, alone)
            case.change()
            report = case.sync.sync(1)
            assert case.holds() and case.sync.published() == 1, (layout, alone)
            rows = case.rows
            counted = {key: width if key in rows.changed else 0 for key, width in rows.widths.items()}
            least = lower_bound(rows.sources, rows.targets, counted) * FLOAT32
            assert report.bytes_moved == least, (layout, alone)
            if tensor == 1:  # each of the 4 engines has all rows once
                assert copied(report) == WORLD * FLOAT32 * LAYERS * sum(numbers[name] for name in targets)
                whole = sum(torch.Size(size).numel() for size in hf_shapes(case.shape).values())
                extra = copied(report) if alone else 0  # A and B are no weights of the checkpoint
                assert everything == WORLD * FLOAT32 * whole + extra
            dist.barrier()


def one_of_the_joined_layers(**sizes):
    """Of qkv_proj, only the rows of q_proj are copied with each version; of experts, nothing is."""
    case = Case(Layout(2, 1, 2), 1, ("q_proj",), alone=False, **sizes)
    case.sync.sync(0)
    case.change()
    report = case.sync.sync(1)
    assert case.holds()
    return copied(report) / (WORLD * FLOAT32 * LAYERS)


def an_engine_that_has_slept():
    case = Case(Layout(2, 1, 2), 2, ALL, alone=True)
    everything = copied(case.sync.sync(0))
    for tensor in case.engine.values():
        tensor.fill_(float("nan"))
    case.sync.forget()
    with pytest.raises(ReshardError, match="the engine has released its memory"):
        case.sync.published()
    assert copied(case.sync.sync(0)) == everything and case.holds()
    case.engine["model.layers.9.extra"] = torch.zeros(1)
    with pytest.raises(ReshardError, match=r"different names: \['model\.layers\.9\.extra'\]"):
        Resharder(case.source, case.engine, *case.rows[:3])
    return True


def together():
    every_case()
    experts = one_of_the_joined_layers(family="qwen3_moe", experts=4, experts_per_token=2)
    return one_of_the_joined_layers(), experts, an_engine_that_has_slept()


def test_each_version_copies_the_rows_that_it_changes_and_no_others():
    for dense, experts, slept in run_ranks(together, WORLD):
        assert dense == experts == WEIGHTS["q_proj"] and slept
