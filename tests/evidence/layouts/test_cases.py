from megatron_stppo.config import ParallelConfig
from megatron_stppo.evidence.layouts.cases import Case, cases, layouts
from megatron_stppo.parallel.layout import Layout
from tests.weights.reshard.pieces import model_shape


def test_every_axis_and_product_that_fits_four_ranks_is_a_case():
    found = {Case(parallel, 64).name(4) for parallel in layouts(model_shape(layers=4), 4)}
    wanted = (
        *("DP4", "TP2 DP2", "TP2 SP DP2", "TP2 CP2", "TP2 SP CP2", "TP2 PP2", "TP2 SP PP2 VPP2", "TP4 SP"),
        *("CP4", "CP2 DP2", "CP2 PP2", "CP2 PP2 VPP2", "CP2 PP2 stages 1..", "PP4", "PP2 DP2"),
    )
    for text in wanted:
        assert f"{text}, 64 tokens" in found
    assert not [text for text in found if "PP4 VPP2" in text], "one layer cannot be divided into two chunks"


def test_experts_are_undivided_or_divided_and_need_sequence_parallelism():
    found = {Case(parallel, 64).name(4) for parallel in layouts(model_shape(layers=4, experts=4, ffn=32), 4)}
    wanted = (
        "EP4 DP4",
        "EP2 DP4",
        "DP4",
        "CP2 EP4 DP2",
        "TP2 SP EP2 DP2",
        "CP4 EP2",
        "EP2 PP2 DP2",
        "TP4 SP",
    )
    assert {f"{text}, 64 tokens" for text in wanted} <= found
    assert not [text for text in found if "TP" in text and "SP" not in text]


def test_layouts_that_the_model_forbids_are_omitted():
    found = list(layouts(model_shape(heads=3, kv_heads=3, layers=3), 4))
    assert {parallel.tensor for parallel in found} == {1}
    assert {parallel.pipeline for parallel in found if not parallel.first_stage_layers} == {1}


def test_the_configured_layout_comes_first_in_every_size_and_order_and_is_not_repeated():
    given = ParallelConfig(tensor=2)
    found = cases(model_shape(layers=4), 4, given, [64, 1, 1000])
    assert [(case.budget, case.reverse, case.apart) for case in found[:5]] == [
        (64, False, False),
        (1, False, False),
        (1000, False, False),
        (64, True, False),
        (1000, False, True),
    ]
    assert all(case.parallel == given for case in found[:5])
    assert given not in [case.parallel for case in found[5:]]
    assert len({case.parallel.model_dump_json() for case in found[5:]}) == len(found) - 5
    assert all(Layout.of_world(4, case.parallel).world == 4 for case in found)
