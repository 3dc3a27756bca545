from dataclasses import replace

from megatron_stppo.families.llama import Qwen2
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.plan.assumptions import H100
from megatron_stppo.plan.times import exchange, shard_bytes
from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts, training_layouts

SHAPE = Qwen2("qwen2", 4, 64, 8, 4, 8, 96, 512, False, 1e6, 1e-6, 512)
ALIKE = {0: 2, 2: 2}  # 4 layers on 2 stages
SIDES = (
    training_layouts(SHAPE, Layout(tensor=2, pipeline=2)),
    serving_layouts(SHAPE, 4, 2),
    row_widths(SHAPE),
)


def test_two_stages_send_half_the_layers_to_each_other() -> None:
    """Ranks 0, 1 hold layers 0 and 1 and the embedding; ranks 2, 3 hold the rest: as many rows and a norm.
    Every rank serves its tensor half of the model, so it needs the rows of the other stage."""
    found = exchange(*SIDES, ALIKE, 2, H100)
    first, second = (
        sum(
            SIDES[2][span.hf_key] * span.size * 2
            for spans in SIDES[0][rank].values()
            for span in spans
            if span.hf_key
        )
        for rank in (0, 2)
    )
    assert found.moved == found.least == 2 * (first + second)
    assert found.at_home == 2 * (first + second)
    assert second <= found.busiest_rank < 1.01 * second  # the final norm is on the second stage
    assert (found.between_nodes, found.busiest_node) == (0, 0)
    assert found.seconds == found.busiest_rank / H100.node_rate


def test_one_layer_of_a_stage_represents_all_its_layers() -> None:
    assert ALIKE == {0: 2, 2: 2}
    every = exchange(*SIDES, dict.fromkeys(range(4), 1), 2, H100)
    found = exchange(*SIDES, ALIKE, 2, H100)
    assert (found.copies, found.moved, found.least) == (every.copies, every.moved, every.least)


def test_bytes_between_nodes_are_counted_separately() -> None:
    found = exchange(*SIDES, ALIKE, 2, replace(H100, per_node=2, network_rate=1.0))
    assert found.between_nodes == found.moved
    assert (
        found.moved / 2 < found.busiest_node < found.moved / 2 * 1.01
    )  # the rows that one of two stages lacks
    assert found.seconds == found.busiest_node


def test_an_engine_of_one_rank_holds_the_whole_model() -> None:
    (whole,) = serving_layouts(SHAPE, 1, 1).values()
    attention = 64 * (64 + 2 * 32) + (64 + 2 * 32) + 64 * 64
    parameters = 2 * 512 * 64 + 64 + 4 * (attention + 3 * 64 * 96 + 2 * 64)
    assert shard_bytes(whole, row_widths(SHAPE), 2) == 2 * parameters
