from __future__ import annotations

import pytest

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.section import enforce
from megatron_stppo.validation import serving


def config(**of_serving: object) -> Config:
    routed = {"routing_replay": "rollout"}
    return Config.model_validate({"model": {"path": "m"}, "algorithm": routed, "serving": of_serving})


def test_experts_of_the_engine_are_not_replayed_if_turns_go_on_with_new_weights() -> None:
    with pytest.raises(
        ConfigError, match=r"serving\.update=recompute with algorithm\.routing_replay=rollout"
    ):
        enforce(serving.rules(config(replicas=2, update="recompute")))
    enforce(serving.rules(config(replicas=2, update="drain")))
    enforce(serving.rules(config(update="recompute")))  # without replicas, no turn runs when weights arrive
