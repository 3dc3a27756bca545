import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_stppo.config import ConfigError
from megatron_stppo.parallel.layout import Coordinates, Layout


def test_ranks_are_ordered_as_megatron_orders_them():
    layout = Layout(tensor=2, pipeline=3, data=4)
    groups = RankGenerator(tp=2, ep=1, dp=4, pp=3, cp=1, order="tp-cp-ep-dp-pp")
    for axis, token in (("tensor", "tp"), ("data", "dp"), ("pipeline", "pp")):
        for ranks in groups.get_ranks(token):
            assert [getattr(layout.coordinates(rank), axis) for rank in ranks] == list(range(len(ranks)))


def test_rank_9_of_2x2x3_stands_where_the_docstring_says_and_rank_inverts_coordinates():
    layout = Layout(tensor=2, pipeline=2, data=3)
    assert layout.coordinates(9) == Coordinates(tensor=1, pipeline=1, data=1)
    assert [layout.rank(layout.coordinates(rank)) for rank in range(12)] == list(range(12))


def test_a_world_that_the_model_does_not_fill_is_refused():
    assert Layout.of_world(8, 2, 2) == Layout(2, 2, 2)
    with pytest.raises(
        ConfigError, match=r"parallel\.tensor=2 \* parallel\.pipeline=2 .* 6; start a multiple of 4"
    ):
        Layout.of_world(6, 2, 2)
