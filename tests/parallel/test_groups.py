"""A few elements go through every group before anything else takes memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from tests.ranks import run_ranks


def connected(parallel: dict[str, int]) -> set[str]:
    process.prepare(engine=False)
    from megatron_stppo.parallel import groups

    config = Config.model_validate({"model": {"path": "m"}, "parallel": parallel})
    found = groups.exchanges(groups.initialize(config.parallel), config, "expert" in parallel, tied=True)
    calls: list[str] = []
    for name in ("synchronize", "empty_cache"):
        setattr(torch.cuda, name, partial(calls.append, name))
    groups.connect(found, torch.device("cpu"))
    assert calls == ["synchronize", "empty_cache"], "errors come here, and the memory goes to the engine"
    return {f"{kind} {group.size()}" for group, kind in found}


@pytest.mark.parametrize(
    ("parallel", "ends", "between"),
    [
        ({"pipeline": 4}, {"sum 2", "sum 4", "pass 4"}, {"sum 4", "pass 4"}),
        ({"pipeline": 2, "virtual": 2}, {"sum 2", "sum 4", "ring 2"}, {"sum 2", "sum 4", "ring 2"}),
        ({"tensor": 2, "expert": 2}, {"sum 2", "sum 4", "swap 2"}, {"sum 2", "sum 4", "swap 2"}),
    ],
)
def test_all_ranks_pass_through_all_their_groups(
    parallel: dict[str, int], ends: set[str], between: set[str]
) -> None:
    assert run_ranks(connected, 4, parallel) == [ends, between, between, ends]
