"""Check the section `serving` against the other sections, and against the checkpoint of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.section import Rule


def rules(config: Config) -> Iterator[Rule]:
    """Return the rules about settings that asynchronous training cannot combine."""
    serving = config.serving
    yield Rule(
        serving.replicas is not None and serving.update == "recompute" and config.replays_rollout,
        "serving.update=recompute with algorithm.routing_replay=rollout: the tokens of a turn would have "
        "experts of several versions",
        "set serving.update=drain or complete, or algorithm.routing_replay=old_policy",
    )


def check_resumed(config: Config, book: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a run with this ledger in its checkpoint can continue with `config`."""
    if config.serving.replicas is not None:
        rollout = config.rollout
        return check_open(book, rollout.tasks_per_iteration, rollout.samples_per_task)
    if book["trained"]:
        raise ConfigError(
            f"serving.replicas=null: the checkpoint's run has trained {len(book['trained'])} tasks before "
            "others that were drawn earlier (serving.order=completion); resume with serving.replicas"
        )


def check_open(book: Mapping[str, Any], tasks: int, samples: int) -> None:
    """Raise ConfigError if a ledger has open groups, in batches of other than `tasks` groups of `samples`."""
    if book["first"] == book["next"]:
        return
    for field, kept, mine in (
        ("tasks_per_iteration", book["tasks"], tasks),
        ("samples_per_task", book["samples"], samples),
    ):
        if kept != mine:
            raise ConfigError(
                f"rollout.{field}={mine}: the checkpoint has admitted groups of a run with {kept}; resume "
                f"with rollout.{field}={kept}"
            )
