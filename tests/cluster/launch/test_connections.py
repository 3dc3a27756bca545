"""CUDA_DEVICE_MAX_CONNECTIONS is 1 where megatron's collectives rely on it, NCCL_NVLS_ENABLE is 0 where sums
must not vary, and a user's values are kept."""

from __future__ import annotations

import sys

import pytest
import torch

from megatron_stppo.cluster.launch import connections, process
from megatron_stppo.config import Config, ParallelConfig
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
    ("parallel", "given", "expected"),
    [(SPLIT, {}, {"NCCL_NVLS_ENABLE": "0"}), (SPLIT, {"NCCL_NVLS_ENABLE": "1"}, {"NCCL_NVLS_ENABLE": "1"}),
     (ParallelConfig(pipeline=2), {}, {})],
)  # fmt: skip
def test_switches_do_not_add_up_what_tensor_parallel_ranks_compute(
    parallel: ParallelConfig, given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set on a GPU only, before the first communicator, and what `verify` names depends on it."""
    environment, seen, config = (
        dict(given),
        list[dict[str, str]](),
        Config.model_validate({"model": {"path": "m"}, "parallel": parallel}),
    )
    monkeypatch.setattr(process.os, "environ", environment)
    monkeypatch.setattr(process, "check", lambda config: None)
    monkeypatch.setattr(process, "join", lambda *_: seen.append(dict(environment)) or sys.exit())
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)  # noqa: B023
        with pytest.raises(SystemExit):
            process.start(config)
    assert seen == [given, expected]
    assert suspects(parallel).startswith("NCCL_NVLS_ENABLE: ") == (expected == {"NCCL_NVLS_ENABLE": "1"})
