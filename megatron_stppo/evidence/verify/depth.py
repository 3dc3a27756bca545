"""Models of fewer layers."""

from megatron_stppo.config import Config


def reduced(config: Config, layers: int | None) -> Config:
    return config
