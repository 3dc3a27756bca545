"""An endpoint for agents that cannot be opened on one rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_stppo.config import Config, ConfigError
from tests.ranks import run_ranks


def open_on_ranks() -> str:
    """Return the error of a rank, where rank 1 lacks a package that vLLM's parser needs."""
    from megatron_stppo.agents.endpoint import opening

    def agents(config: Config) -> None:
        if dist.get_rank() == 1:
            raise ConfigError("environment.tool_parser=mistral: vLLM cannot load it")

    config = Config.model_validate({"model": {"path": "m"}, "environment": {"kind": "agent", "agent": "a:b"}})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as raised:
        patch.setattr(opening, "_agents", agents)
        opening.open_environment(config, False)
    return str(raised.value)


def test_all_ranks_raise_the_error_of_the_rank_that_cannot_open_it() -> None:
    assert run_ranks(open_on_ranks, 2) == ["environment.tool_parser=mistral: vLLM cannot load it"] * 2
