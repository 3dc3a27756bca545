"""Assumptions of a forecast, and the splits that layout and batch allow."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import load
from megatron_stppo.observe.throughput import PEAK_FLOPS
from megatron_stppo.plan import assumptions
from megatron_stppo.plan.simulation.workload import DrawnLengths, LogNormal, ToolTimes, Workload
from megatron_stppo.plan.usage import EngineUse
from megatron_stppo.validation.checks import candidates
from megatron_stppo.weights.sharding.hf_names import read_shape

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    """32B: a layout of 16 GPUs, engines of 8, 1,024 trajectories in 2 minibatches."""
    monkeypatch.chdir(EXAMPLES.parent)
    return load(EXAMPLES / "qwen2.5-32b" / "config.yaml")


def test_the_planned_gpu_has_the_peak_with_which_mfu_is_computed() -> None:
    assert assumptions.H100.flops == PEAK_FLOPS["NVIDIA H100 80GB HBM3"]


def test_a_log_normal_distribution_has_its_median_and_99_percent_quantile() -> None:
    chance, calls = random.Random(0), LogNormal(0.2, 4.0, most=30.0)
    drawn = sorted(calls.draw(chance) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(0.2, rel=0.05)
    assert drawn[19_800] == pytest.approx(4.0, rel=0.15)
    assert drawn[-1] <= 30.0


def test_an_episode_ends_when_its_context_is_full() -> None:
    """A prompt of 50 and a turn of 20 leave 30 of 100 tokens. An observation of 40 does not fit, one of 25
    leaves a turn of 5."""
    one, twenty = LogNormal(1, 1), LogNormal(20, 20)

    def turns(observation: float) -> tuple[tuple[int, int], ...]:
        given = DrawnLengths(
            LogNormal(50, 50), LogNormal(9, 9), twenty, LogNormal(observation, observation), 100
        )
        return Workload(given, ToolTimes(one, at_once=1)).episode(0).sizes.turns

    assert turns(40) == ((50, 20),)
    assert turns(25) == ((50, 20), (25, 5))


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("tool_second=1", "did you mean --assume tool_seconds=VALUE?"),
        ("tool_seconds=-1", "'-1' is not a number above 0"),
        ("tool_seconds", "'' is not a number above 0"),
        ("memory_share=1.5", "'1.5' is not a number above 0 and at most 1"),
        ("turns=inf", "'inf' is not a number above 0"),
        ("tool_seconds=20", "tool_seconds_p99=10: is below the median tool_seconds=20; give both"),
    ],
)
def test_a_wrong_assumption_is_refused_with_its_name(config: Config, override: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"^--assume ") as error:
        assumptions.read(config, [override])
    assert why in str(error.value)


def test_an_assumption_replaces_the_default(config: Config) -> None:
    given = assumptions.read(config, ["tool_seconds=2", "tool_seconds_p99=20"])
    assert (given["tool_seconds"], given["turns"]) == (2.0, 4.0)
    assert assumptions.tools(config, given) == ToolTimes(LogNormal(2.0, 20.0, 30.0), at_once=256)


def test_a_split_fits_the_layout_the_engines_and_the_batch(config: Config) -> None:
    found = candidates(config, 72)
    assert found.trainers == (16, 32, 64)  # and 56, 40 and 8 GPUs for replicas of 8
    (uneven,) = found.left_out
    assert uneven.startswith("48 GPUs for training: the 1024 trajectories of a batch are not a multiple of")
    assert "72" in found.refusal  # 72 GPUs are not a multiple of 16


def test_too_few_gpus_for_a_trainer_and_a_replica_are_refused(config: Config) -> None:
    found = candidates(config, 16)
    assert found.trainers == ()
    assert found.left_out == (
        "16 GPUs: parallel.tensor * context * pipeline = 16 GPUs train, and none is left for a replica",
    )


def test_a_communicator_has_its_tables_and_a_connection_per_channel_and_neighbour() -> None:
    """Tables take 192 MiB; 24 channels 12 each in a node, 16 take 20 between nodes; 32 send to a rank."""
    for ranks, kind, mebibytes in (
        ((0,), "sum", 192),
        ((0, 1), "sum", 192 + 24 * 12),
        (range(4), "sum", 192 + 2 * 24 * 12),
        (range(0, 32, 8), "sum", 192 + 2 * 16 * 20),
        (range(8), "swap", 192 + 7 * 32 * 12),
        (range(16), "swap", 192 + 7 * 4 * 12 + 64),
        ((0, 8), "pass", 192 + 64),
        ((0, 1), "ring", 2 * (192 + 32 * 12)),
    ):
        assert assumptions.communicator(ranks, kind, 8) == int(1.2 * mebibytes * 2**20), (ranks, kind)


def test_an_engine_with_experts_has_two_communicators_and_links_receive_from_one_replica(
    config: Config,
) -> None:
    """An engine of 8 dense ranks, one of 4 with experts."""
    experts = load(EXAMPLES / "qwen3-30b-a3b" / "config.yaml")
    for of, ranks, count in ((config, 8, 1), (experts, 4, 2)):
        use = EngineUse.of(of, read_shape(of.model.path), 0, 2, assumptions.H100)
        assert use.communicators == count * assumptions.communicator(range(ranks), "sum", 8)
    for tensor, joined, mebibytes in ((1, 3, 3 * 192 + 32 * (10 + 2 * 2)), (8, 2, 2 * 256 + 8 * 4 * 20)):
        assert assumptions.links(tensor, joined, 8) == int(1.2 * mebibytes * 2**20)
    assert assumptions.links(8, 0, 8) == 0
