"""The functions of `algorithm.loss` and `algorithm.advantage`, of the user and of LOSSES, and the surrogate
of such a loss, with the outputs of the built-in one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from megatron_stppo.algorithm.own import LOSSES, OwnAdvantage, OwnLoss, check_advantage, check_loss
from megatron_stppo.algorithm.penalties import weighted_sum
from megatron_stppo.config import Config, ConfigError, user_code
from megatron_stppo.ops.clipped_surrogate import ClippedSurrogate


@dataclass(frozen=True)
class Own:
    """Functions in place of the surrogate and of the advantages of presets; None where these are used."""

    loss: OwnLoss | None = None
    advantage: OwnAdvantage | None = None

    @classmethod
    def of(cls, config: Config) -> Self:
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
    found = user_code.function(where, text, config.environment.modules, field)
    if not callable(found):
        raise ConfigError(f"{where}: is no function; {user_code.REMEDY}")
    with user_code.one_line(where, "see docs/algorithms.md, A loss or an advantage of your own"):
        check(found)
    return found


def own_surrogate(
    loss: OwnLoss,
    logprob_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    offsets: Tensor | None,
) -> ClippedSurrogate:
    """Return the objective -sum_t c_t loss_T. Nothing counts as clipped; the correction's norms are 0.

    All arguments [T], float32; weight_T: c_t. Tokens of weight 0 may hold NaN. Raises ValueError if the
    result has another shape.
    """
    dead_T = weight_T == 0
    old_T = torch.where(dead_T, logprob_T.detach(), old_T)
    loss_T = loss(logprob_T, old_T, advantage_T.masked_fill(dead_T, 0), offsets)
    if loss_T.shape != logprob_T.shape:
        raise ValueError(f"algorithm.loss: returned {list(loss_T.shape)} for {len(logprob_T)} tokens")
    with torch.no_grad():
        delta_T = (logprob_T - old_T)[~dead_T]
        count = max(1, len(delta_T))
        k1, k3 = -delta_T.sum() / count, (delta_T.exp() - 1 - delta_T).sum() / count
        none = torch.zeros_like(k1)
        tokens = none + len(delta_T)
    return ClippedSurrogate(
        objective=-weighted_sum(loss_T, weight_T),
        ratio=torch.empty_like(logprob_T[:0]),
        clip_fraction=none,
        bias_sq=none,
        grad_sq=none,
        kl_k1=k1,
        kl_k3=k3,
        clipped=none,
        tokens=tokens,
        logit_bias_sq=none,
        logit_grad_sq=none,
        grad_T=torch.empty_like(logprob_T[:0]),
        bias_T=None,
    )
