"""Where the old policy's log-probs come from, the denominators of the importance ratios.

score: from a forward pass of the trainer before the update.
update: from the update's own forward pass. With one optimizer step per epoch, every trajectory is in the
first step, whose forward pass still uses the old policy. It computes the same log-probs as a pass of its own
would, bit for bit, so training is the same.
behaviour: from the engine, which generated the tokens; the trainer needs no pass.
"""

from collections.abc import Iterator
from typing import Literal

from megatron_stppo.config.algorithm import AlgorithmConfig
from megatron_stppo.config.section import Rule
from megatron_stppo.config.update import UpdateConfig

Source = Literal["score", "update", "behaviour"]


def early_uses(update: UpdateConfig, a: AlgorithmConfig) -> Iterator[Rule]:
    """Return the settings that need the old log-probs before the first step's forward pass."""
    yield Rule(
        update.minibatches > 1,
        f"update.minibatches={update.minibatches}: only the first step of an epoch computes with the old "
        "policy",
        "update.minibatches=1",
    )
    yield Rule(
        a.kl_coefficient > 0 and a.kl_in == "reward",
        f"algorithm.kl_in=reward with algorithm.kl_coefficient={a.kl_coefficient}: the rewards, and so the "
        "advantages, contain the old log-probs",
        "algorithm.kl_in=loss and algorithm.kl_estimator=k3",
    )
    yield _weights(a, "the weights of the loss contain the old log-probs")
    yield _recorded_experts(a)


def trainers_uses(update: UpdateConfig, a: AlgorithmConfig) -> Iterator[Rule]:
    """Return the settings that need old log-probs by the trainer."""
    yield Rule(
        update.old_logprob != "auto",
        f"update.old_logprob={update.old_logprob}: no forward pass computes the old log-probs",
        "update.old_logprob=auto",
    )
    yield _weights(a, "all its weights would be 1, because the old policy is the engine's")
    yield _recorded_experts(a)


def _weights(a: AlgorithmConfig, why: str) -> Rule:
    return Rule(a.mismatch != "off", f"algorithm.mismatch={a.mismatch}: {why}", "algorithm.mismatch=off")


def _recorded_experts(a: AlgorithmConfig) -> Rule:
    return Rule(
        a.routing_replay == "old_policy",
        f"algorithm.routing_replay={a.routing_replay}: the experts to replay are recorded in the pass that "
        "computes the old log-probs",
        "algorithm.routing_replay=off",
    )


def source(update: UpdateConfig, algorithm: AlgorithmConfig) -> Source:
    """Return where the old log-probs come from.

    Example: update.old_logprob=auto gives "update" with one minibatch and no early use, else "score".
    """
    if algorithm.old_policy == "behaviour":
        return "behaviour"
    early = any(rule.broken for rule in early_uses(update, algorithm))
    return "score" if update.old_logprob == "score" or early else "update"


def rules(update: UpdateConfig, algorithm: AlgorithmConfig) -> Iterator[Rule]:
    """Return the rules about algorithm.old_policy and update.old_logprob."""
    if algorithm.old_policy == "behaviour":
        asked, uses, other = "algorithm.old_policy=behaviour", trainers_uses, "algorithm.old_policy=score"
    elif update.old_logprob == "update":
        asked, uses, other = "update.old_logprob=update", early_uses, "update.old_logprob=auto"
    else:
        return
    for rule in uses(update, algorithm):
        yield Rule(rule.broken, f"{asked}: {rule.problem}", f"set {other}, or {rule.remedy}")
