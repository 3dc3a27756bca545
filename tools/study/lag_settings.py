"""The settings of the second stage of docs/study/protocol.md as data: rollouts that lag, a third task."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

LAGS = (0, 1, 2, 4, 8)  # age of the rollouts, in iterations
# {suffix of a setting: what sees the lag}
CORRECTIONS: dict[str, Fields] = {
    "": {},  # nothing: the old policy is computed anew when a batch is used
    "_behaviour": {"algorithm.old_policy": "behaviour"},
    "_truncate": {"algorithm.mismatch": "truncate"},
    "_mask": {"algorithm.mismatch": "mask"},
}
# Asynchronous runs in which a batch is used once.
SERVED: Fields = {
    "serving.replicas": 1,
    "serving.update": "complete",  # of three, the one with which an age is exact and runs can be repeated
    "serving.concurrency": 1024,  # all episodes of lag 8 at once
    "update.epochs": 1,
}
# {name of the setting: (lag, suffix)}
LAGGED = {f"lag_{lag}{suffix}": (lag, suffix) for suffix in CORRECTIONS for lag in LAGS}
# The same again on another type of CPU, where the cold start of a seed is another model.
REPEATED = {f"again_{lag}{suffix}": (lag, suffix) for suffix in CORRECTIONS for lag in (4, 8)}
# {name of a setting of the third task: (the actor's learning rate, lag)}
SUMMED = {f"sums_{rate}_lag_{lag}": (float(f"{rate}e-4"), lag) for rate in ("3", "6") for lag in (0, 4)}


def settings() -> dict[str, Fields]:
    """Return {name: fields}. The critic of the third task has its example's rate.

    Example: lag_8_mask has serving.max_staleness=8 and algorithm.mismatch=mask.
    """
    aged = LAGGED | REPEATED
    lagged = {name: _served(lag, 3e-4, 1.8e-3) | CORRECTIONS[suffix] for name, (lag, suffix) in aged.items()}
    summed = {
        name: _served(lag, rate, 4.5e-4) | CORRECTIONS["_behaviour"] for name, (rate, lag) in SUMMED.items()
    }
    return lagged | summed


def _served(lag: int, actor: float, critic: float) -> Fields:
    rates = {"update.actor.lr": actor, "update.critic.lr": critic}
    return SERVED | {"serving.max_staleness": lag} | rates
