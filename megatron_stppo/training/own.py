"""Loads the functions that `algorithm.loss` and `algorithm.advantage` name, of the user and of LOSSES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_stppo.algorithm.losses import LOSSES
from megatron_stppo.algorithm.own import OwnAdvantage, OwnLoss, check_advantage, check_loss
from megatron_stppo.config import Config, ConfigError, own_code


@dataclass(frozen=True)
class Own:
    """Functions in place of the surrogate and of the advantages of presets; None where these are used."""

    loss: OwnLoss | None = None
    advantage: OwnAdvantage | None = None

    @classmethod
    def of(cls, config: Config) -> Own:
        """Import and check the functions. Raises ConfigError if one cannot be used."""
        a = config.algorithm
        advantage = a.advantage if a.own_advantage else None
        if a.loss is not None and not a.own_loss:
            loss = partial(LOSSES[a.loss], low=1 - a.clip_low, high=1 + a.clip_high)
        else:
            loss = _load(config, "loss", a.loss, check_loss)
        return cls(loss, _load(config, "advantage", advantage, check_advantage))


def _load(config: Config, field: str, text: str | None, check: Callable[[Any], None]) -> Any:
    if text is None:
        return None
    where = f"algorithm.{field}={text}"
    found = own_code.function(where, text, config.environment.modules, field)
    if not callable(found):
        raise ConfigError(f"{where}: is no function; {own_code.REMEDY}")
    with own_code.one_line(where, "see docs/algorithms.md, A loss or an advantage of your own"):
        check(found)
    return found
