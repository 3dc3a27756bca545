"""Check the section `serving` against the other sections."""

from __future__ import annotations

from megatron_stppo.config import Config, ConfigError


def check(config: Config) -> None:
    """Raise ConfigError for settings that asynchronous training cannot combine."""
    if config.serving.replicas is None:
        return
    if config.replays_rollout and config.serving.update == "recompute":
        raise ConfigError(
            "serving.update=recompute with algorithm.routing_replay=rollout: the tokens of a turn would have "
            "experts of several versions; set serving.update=drain, or algorithm.routing_replay=old_policy"
        )
