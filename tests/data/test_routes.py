from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.config import ConfigError
from megatron_stppo.data.packing import PackingSpec, pack, to_batch
from megatron_stppo.data.routes import dtype_of, joined, unknown

TASK = Task("t", (), ("a",), "train", 7)
# tokens 1 2 3 | 4 5, of which the engine read all but the last; 2 layers, 1 expert per token
PLAYED = Trajectory(
    TASK, (1, 2, 3), (Turn((4, 5), (-0.1, -0.2), (), 1.0, ((0, 2),)),), "ok", routes=bytes(range(8))
)
FAILED = Trajectory(TASK, (1, 2), (), "error")


def test_the_last_token_and_a_trajectory_without_turns_have_unknown_experts() -> None:
    given = joined([FAILED, PLAYED], layers=2, chosen=1, experts=8)
    assert given.dtype == torch.uint8
    assert given[..., 0].tolist() == [[255] * 2] * 2 + [[0, 1], [2, 3], [4, 5], [6, 7]] + [[255] * 2]


def test_256_experts_need_more_than_a_byte() -> None:
    assert (dtype_of(255), dtype_of(256)) == (torch.uint8, torch.int32)
    chosen = np.array([255, 0, 1, 2, 3, 4, 5, 6], dtype=np.int32)
    given = joined([replace(PLAYED, routes=chosen.tobytes())], layers=2, chosen=1, experts=256)
    assert given[0, :, 0].tolist() == [255, 0]
    assert given[-1, 0, 0] == unknown(torch.int32) == 2**31 - 1


@pytest.mark.parametrize("experts", [8, 256])
def test_the_router_chooses_where_the_experts_are_unknown(experts: int) -> None:
    width = dtype_of(experts).itemsize
    routes = np.arange(8, dtype=np.uint8 if width == 1 else np.int32).tobytes()
    every = [FAILED, replace(PLAYED, routes=routes)]
    batch = replace(to_batch(every), routes_P=joined(every, layers=2, chosen=1, experts=experts))
    (microbatch,) = pack(batch, [0, 1], PackingSpec(100, multiple=4))
    assert microbatch.routes_P is not None and microbatch.routes_P.dtype == torch.int16
    assert microbatch.routes_P[:, 0, 0].tolist() == [-1, -1, 0, 2, 4, 6, -1, -1]  # the last one is a dummy


def test_a_rank_without_a_token_has_a_dummy_token_whose_experts_the_router_chooses() -> None:
    batch = to_batch([replace(FAILED, prompt_ids=())])
    batch = replace(batch, routes_P=torch.empty(0, 2, 1, dtype=torch.uint8))
    (microbatch,) = pack(batch, [0], PackingSpec(100, multiple=4))
    assert microbatch.routes_P is not None and microbatch.routes_P.unique().tolist() == [-1]


@pytest.mark.parametrize("routes", [b"", bytes(7), bytes(9)])
def test_missing_experts_are_refused(routes: bytes) -> None:
    with pytest.raises(ConfigError) as error:
        joined([replace(PLAYED, routes=routes)], layers=2, chosen=1, experts=8)
    assert str(error.value) == (
        f"algorithm.routing_replay=rollout: a trajectory of task 7 has {len(routes)} bytes of experts "
        "instead of 2 for each of 4 tokens; set it to old_policy or off"
    )
