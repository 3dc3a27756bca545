"""CUDA_DEVICE_MAX_CONNECTIONS is 1 where megatron's collectives rely on it, NCCL_NVLS_ENABLE is 0 where sums
must not vary, and a user's values are kept."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch

from megatron_stppo.cluster.launch import connections, process, rendezvous
from megatron_stppo.config import ParallelConfig
from megatron_stppo.evidence.checks.reference import suspects

HOPPER, BLACKWELL = 9, 10
SPLIT = ParallelConfig(tensor=2, sequence=True)


@pytest.mark.parametrize(
    "parallel",
    [SPLIT, ParallelConfig(tensor=2), ParallelConfig(context=2), ParallelConfig(tensor=4, context=2)],
)
def test_tensor_and_context_parallelism_set_it_on_a_gpu_before_blackwell(parallel: ParallelConfig) -> None:
    environment: dict[str, str] = {}
    assert connections.keep_order(environment, parallel, [HOPPER]) is None
    assert environment == {connections.NAME: "1"}


@pytest.mark.parametrize(
    ("parallel", "generations"),
    [
        (ParallelConfig(), [HOPPER]),
        (ParallelConfig(pipeline=2, expert=2), [HOPPER]),
        (SPLIT, [BLACKWELL, BLACKWELL]),
        (SPLIT, []),
    ],
)
def test_it_is_left_alone_where_nothing_relies_on_it(
    parallel: ParallelConfig, generations: list[int]
) -> None:
    environment: dict[str, str] = {}
    assert connections.keep_order(environment, parallel, generations) is None
    assert environment == {}


def test_a_value_of_the_user_is_kept_and_another_than_1_is_warned_about() -> None:
    environment = {connections.NAME: "8"}
    warning = connections.keep_order(environment, ParallelConfig(tensor=2, context=4), [HOPPER])
    assert environment == {connections.NAME: "8"}
    assert warning is not None
    assert warning.startswith("CUDA_DEVICE_MAX_CONNECTIONS=8: with parallel.tensor=2 and parallel.context=4 ")
    assert connections.keep_order({connections.NAME: "1"}, SPLIT, [HOPPER]) is None


@pytest.mark.parametrize(
    ("world", "given", "expected"), [("2", None, "0"), ("2", "1", "1"), ("1", None, None)]
)
def test_switches_do_not_add_up_what_ranks_compute(
    world: str, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set on GPUs only, before the first communicator, whatever the layout is: `check-layouts` begins
    with one rank per model. What `verify` names depends on it."""
    environment = {"RANK": "0", "WORLD_SIZE": world} | ({} if given is None else {connections.NVLS: given})
    seen = list[str | None]()
    monkeypatch.setattr(process.os, "environ", environment)
    monkeypatch.setattr(rendezvous, "raise_file_limit", lambda *_: sys.exit())
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)  # noqa: B023
        with pytest.raises(SystemExit):
            process.join(timedelta(seconds=1))
        seen.append(environment.get(connections.NVLS))
    assert seen == [given, expected]
    assert suspects(SPLIT).startswith("NCCL_NVLS_ENABLE: ") == (expected != "0")
