"""Where the old policy's log-probs come from, the denominators of the importance ratios.

score: from a forward pass of the trainer before the update.
update: from the update's own forward pass. With one optimizer step per epoch, every trajectory is in the
first step, whose forward pass still uses the old policy. It computes the same log-probs as a pass of its own
would, bit for bit, so training is the same.
behaviour: from the engine, which generated the tokens; the trainer needs no pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_stppo.config.algorithm import AlgorithmConfig
from megatron_stppo.config.update import UpdateConfig

Source = Literal["score", "update", "behaviour"]


@dataclass(frozen=True)
class Conflict:
    """A setting that cannot be combined with a source of the old log-probs."""

    is_set: Callable[[UpdateConfig, AlgorithmConfig], bool]
    setting: Callable[[UpdateConfig, AlgorithmConfig], str]
    reason: str
    remedy: str


RECORDED_EXPERTS = Conflict(
    lambda u, a: a.routing_replay == "old_policy",
    lambda u, a: f"algorithm.routing_replay={a.routing_replay}",
    "the experts to replay are recorded in the pass that computes the old log-probs",
    "algorithm.routing_replay=off",
)
# settings that need the old log-probs before the first step's forward pass
EARLY_USES: tuple[Conflict, ...] = (
    Conflict(
        lambda u, a: u.minibatches > 1,
        lambda u, a: f"update.minibatches={u.minibatches}",
        "only the first step of an epoch computes with the old policy",
        "update.minibatches=1",
    ),
    Conflict(
        lambda u, a: a.kl_coefficient > 0 and a.kl_in == "reward",
        lambda u, a: f"algorithm.kl_in=reward with algorithm.kl_coefficient={a.kl_coefficient}",
        "the rewards, and so the advantages, contain the old log-probs",
        "algorithm.kl_in=loss and algorithm.kl_estimator=k3",
    ),
    Conflict(
        lambda u, a: a.mismatch != "off",
        lambda u, a: f"algorithm.mismatch={a.mismatch}",
        "the weights of the loss contain the old log-probs",
        "algorithm.mismatch=off",
    ),
    RECORDED_EXPERTS,
)
# settings that need old log-probs by the trainer
TRAINERS_USES: tuple[Conflict, ...] = (
    Conflict(
        lambda u, a: u.old_logprob != "auto",
        lambda u, a: f"update.old_logprob={u.old_logprob}",
        "no forward pass computes the old log-probs",
        "update.old_logprob=auto",
    ),
    Conflict(
        lambda u, a: a.mismatch != "off",
        lambda u, a: f"algorithm.mismatch={a.mismatch}",
        "all its weights would be 1, because the old policy is the engine's",
        "algorithm.mismatch=off",
    ),
    RECORDED_EXPERTS,
)


def source(update: UpdateConfig, algorithm: AlgorithmConfig) -> Source:
    """Return where the old log-probs come from.

    Example: update.old_logprob=auto gives "update" with one minibatch and no early use, else "score".
    """
    if algorithm.old_policy == "behaviour":
        return "behaviour"
    early = _first(EARLY_USES, update, algorithm)
    return "score" if update.old_logprob == "score" or early is not None else "update"


def refusal(update: UpdateConfig, algorithm: AlgorithmConfig) -> str | None:
    """Return why algorithm.old_policy or update.old_logprob is refused, or None if neither is."""
    if algorithm.old_policy == "behaviour":
        asked, conflicts, other = (
            "algorithm.old_policy=behaviour",
            TRAINERS_USES,
            "algorithm.old_policy=score",
        )
    elif update.old_logprob == "update":
        asked, conflicts, other = "update.old_logprob=update", EARLY_USES, "update.old_logprob=auto"
    else:
        return None
    found = _first(conflicts, update, algorithm)
    if found is None:
        return None
    return f"{asked}: {found.setting(update, algorithm)}: {found.reason}; set {other}, or {found.remedy}"


def _first(
    conflicts: tuple[Conflict, ...], update: UpdateConfig, algorithm: AlgorithmConfig
) -> Conflict | None:
    return next((one for one in conflicts if one.is_set(update, algorithm)), None)
