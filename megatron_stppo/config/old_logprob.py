"""When the old policy's log-probs can be taken from the update's own forward pass.

With one optimizer step per epoch, every trajectory is in the first step, whose forward pass still uses the
old policy. It computes the same log-probs as a pass of its own would, bit for bit, so training is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_stppo.config.algorithm import AlgorithmConfig
from megatron_stppo.config.update import UpdateConfig


@dataclass(frozen=True)
class EarlyUse:
    """A setting that needs the old log-probs before the first step's forward pass."""

    is_set: Callable[[UpdateConfig, AlgorithmConfig], bool]
    setting: Callable[[UpdateConfig, AlgorithmConfig], str]
    reason: str
    remedy: str


EARLY_USES = (
    EarlyUse(
        lambda u, a: u.minibatches > 1,
        lambda u, a: f"update.minibatches={u.minibatches}",
        "only the first step of an epoch computes with the old policy",
        "update.minibatches=1",
    ),
    EarlyUse(
        lambda u, a: a.kl_coefficient > 0 and a.kl_in == "reward",
        lambda u, a: f"algorithm.kl_in=reward with algorithm.kl_coefficient={a.kl_coefficient}",
        "the rewards, and so the advantages, contain the old log-probs",
        "algorithm.kl_in=loss and algorithm.kl_estimator=k3",
    ),
    EarlyUse(
        lambda u, a: a.mismatch != "off",
        lambda u, a: f"algorithm.mismatch={a.mismatch}",
        "the weights of the loss contain the old log-probs",
        "algorithm.mismatch=off",
    ),
    EarlyUse(
        lambda u, a: a.routing_replay == "old_policy",
        lambda u, a: f"algorithm.routing_replay={a.routing_replay}",
        "the experts to replay are recorded in the pass that computes the old log-probs",
        "algorithm.routing_replay=off",
    ),
)


def early_use(update: UpdateConfig, algorithm: AlgorithmConfig) -> EarlyUse | None:
    """Return the first setting that needs the old log-probs before the update, or None."""
    return next((one for one in EARLY_USES if one.is_set(update, algorithm)), None)


def refusal(update: UpdateConfig, algorithm: AlgorithmConfig) -> str | None:
    """Return why update.old_logprob=update is refused, or None if it is not."""
    found = early_use(update, algorithm)
    if update.old_logprob != "update" or found is None:
        return None
    return (
        f"update.old_logprob=update: {found.setting(update, algorithm)}: {found.reason}; choose auto or "
        f"score, or set {found.remedy}"
    )
