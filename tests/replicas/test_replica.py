"""Replicas with a real engine, a real transport and a trainer that follows a script, each in its process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_stppo.base.types import Trajectory
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.replicas.wire import keys
from megatron_stppo.replicas.wire.measure import Counters
from megatron_stppo.weights.sharding.hf_names import read_shape
from tests.ranks import run_ranks
from tests.replicas.games import Dice
from tests.replicas.scripts import train
from tests.rollout.vllm.tiny import CONTEXT, Game, build_model


def config(model: Path, run: Path, **changes: dict[str, Any]) -> Config:
    sections: dict[str, Any] = {
        "model": {"path": model},
        "run": {"root": run.parent, "name": run.name},
        "rollout": {"max_prompt_tokens": 60, "max_turn_tokens": 40, "max_context": CONTEXT},
        "environment": {"kind": "tests.replicas.games:factory", "max_observation_tokens": 30, "deadline": 5},
        "serving": {"replicas": 1, "timeout": 20.0},
    }
    return Config(**{name: fields | changes.get(name, {}) for name, fields in sections.items()})


# The replicas' side: one process and one engine, which serves one replica after another. scripts.py has the
# trainer's side.


def serve(model: Path, run: Path) -> dict[str, Any]:
    from megatron_stppo.rollout.vllm.engine import Engine, EngineSettings

    engine = Engine(EngineSettings(model, max_context=CONTEXT, max_sequences=16, kv_cache_gib=0.05))
    given, draining, seen = config(model, run), config(model, run, serving={"update": "drain"}), {}
    with paced(engine):
        seen["recompute"] = once(engine, given, run, "recompute", Dice)
        seen["again"] = once(engine, given, run, "again", Dice)
    seen["drain"] = once(engine, draining, run, "drain", Dice)
    seen["misuse"] = once(engine, given, run, "misuse", Game)
    seen["refuse"] = once(engine, given, run, "refuse", Game)
    seen["alone"] = once(engine, given, run, "alone", Game)
    return seen


@contextlib.contextmanager
def paced(engine: Any) -> Iterator[None]:
    """Every step takes 20 ms longer, so that turns are in progress when a slow trainer's update comes."""
    step = engine.step

    def slow() -> Any:
        time.sleep(0.02)
        return step()

    engine.step = slow
    try:
        yield
    finally:
        engine.step = step


def once(
    engine: Any,
    given: Config,
    folder: Path,
    name: str,
    environment: Callable[[], Any],
) -> tuple[str, Counters]:
    """Serve as replica `name`. Return (how it ended, its counters)."""
    from megatron_stppo.cluster.launch.rendezvous import connect_store
    from megatron_stppo.replicas.replica.replica import Replica
    from megatron_stppo.replicas.replica.start import first_rank
    from megatron_stppo.replicas.wire.weights import Link
    from megatron_stppo.training.rollouts import rollout_settings

    shape, timeout = read_shape(given.model.path), timedelta(seconds=20)
    connection, notice = keys.find(given.run.folder, 60), SimpleNamespace(reason="")

    def link(route: Any, receives: bool) -> Link:
        store = connect_store(route.host, route.port, timeout)
        return Link(engine.parameters(), shape, route, receives, store, timeout)

    with first_rank(given, connection, notice, name, engine, environment) as first:  # type: ignore[arg-type]
        replica = Replica(
            engine, rollout_settings(given).limits, link, lambda phase: contextlib.nullcontext(), first
        )
        try:
            end = replica.run()
            said = f"{end.kind}: {end.text}"
        except ConfigError as error:
            said = f"ConfigError: {error}"
    engine.abort_all()
    replica.close()
    return said, first.activity.counters


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served_model")
    build_model(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "served"


@pytest.fixture(scope="module")
def seen(model: Path, run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the trainer and the replicas saw."""
    with ThreadPoolExecutor(2) as both:
        trainer = both.submit(run_ranks, train, 1, model, run)
        replicas = both.submit(run_ranks, serve, 1, model, run)
        return trainer.result()[0], replicas.result()[0]


def versions(trajectory: Trajectory) -> list[list[int]]:
    """Return the versions of each turn."""
    return [[version for version, _ in turn.versions] for turn in trajectory.turns]


def test_turns_go_on_at_a_new_version_after_their_cache_is_computed_again(seen: Any) -> None:
    played, (end, counters) = seen[0]["recompute"], seen[1]["recompute"]
    assert end == "stop: the script has ended"
    turns = [turn for t in played.values() for turn in versions(t)]
    assert [3, 4] in turns and all(turn == sorted(turn) for turn in turns)
    assert all(
        sum(n for _, n in turn.versions) == len(turn.token_ids) for t in played.values() for turn in t.turns
    )
    assert (counters.updates, counters.episodes) == (2, 8)
    assert counters.tokens == sum(turn.tokens for t in played.values() for turn in t.summary.turns)
    assert counters.recomputed > 0 and 0 < counters.longest_pause <= counters.pause_seconds


def test_turns_wait_for_weights_that_did_not_arrive_and_go_on_when_they_are_sent_again(seen: Any) -> None:
    (failed, played), (end, counters) = seen[0]["again"], seen[1]["again"]
    assert "over broken-4: rank 0: GivenUp: its process ended" in failed.failed
    assert end == "stop: the script has ended" and counters.updates == 1
    turns = [turn for t in played.values() for turn in versions(t)]
    assert [3, 4] in turns and {v for turn in turns for v in turn} == {3, 4}


def test_with_drain_each_turn_has_one_version(seen: Any) -> None:
    played, (_, counters) = seen[0]["drain"], seen[1]["drain"]
    turns = [turn for t in played.values() for turn in versions(t)]
    assert {tuple(turn) for turn in turns} == {(3,), (4,)}
    assert (counters.updates, counters.recomputed) == (1, 0)


def test_failures_reach_the_trainer_in_one_line(seen: Any) -> None:
    told, ends = seen[0], {name: end for name, (end, _) in seen[1].items()}
    assert told["misuse"].kind == "misuse" and told["misuse"].text.startswith(
        "Game.step(): cannot be awaited"
    )
    assert ends["misuse"] == f"ConfigError: {told['misuse'].text}"
    assert ends["refuse"].startswith("refused: dtype=float32: the trainer has bfloat16")
    assert ends["alone"].startswith("lost: 127.0.0.1:")
