"""Watch whether clipping, the correction and the controller of the rate change any step.

A preset whose mechanisms never act trains as the policy gradient alone does, whatever its name says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from megatron_stppo.config import AlgorithmConfig

WINDOW = 10  # iterations
# {mechanism: (column, its value where the mechanism changes nothing, what makes it act)}
MECHANISMS = {
    "clipping": (
        "actor/clip_fraction",
        0.0,
        "raise update.actor.lr or update.minibatches, or lower algorithm.clip_low and algorithm.clip_high",
    ),
    "the correction": (
        "actor/correction_scale",
        1.0,
        "it can only act where tokens are clipped, and where algorithm.correction_floor lets it",
    ),
    "the controller": ("actor/rate_scale", 1.0, "raise update.actor.lr, or lower algorithm.rate_kl"),
}


class Acting:
    """Records which mechanisms changed the steps of the last WINDOW iterations.

    Iterations without an applied step are left out. The warm-up of the rate is not counted as idle.

    Example: of 2 steps each in 10 iterations, 5 in all had a clipped token: actor/acted_share is 0.25.
    """

    def __init__(self, algorithm: AlgorithmConfig, rate: float) -> None:
        """rate: update.actor.lr."""
        configured = {
            "clipping": algorithm.loss is None,
            "the correction": algorithm.correction != "off",
            "the controller": algorithm.rate != "constant",
        }
        self._idle = {name: 0 for name, given in configured.items() if given}
        self._shares: deque[float] = deque(maxlen=WINDOW)
        self._rate = rate

    def look(self, row: Mapping[str, Any]) -> tuple[dict[str, float], str | None]:
        """Record an iteration's row. Return its column actor/acted_share, and a warning or None.

        The warning comes once for each mechanism, when it has changed no step in WINDOW iterations in a row.
        row["actor/acted_share"] is the share of the iteration's own steps.
        """
        own = row.get("actor/acted_share")
        if own is None or row["actor/held"] == 1.0:
            return {}, None
        self._shares.append(own)
        warm = row["actor/lr"] >= self._rate
        for name in self._idle:
            column, neutral, _ = MECHANISMS[name]
            if row[column] != neutral:
                self._idle[name] = -(10**9)  # it has acted, so that nothing is said any more
            elif warm:
                self._idle[name] += 1
        late = [name for name, count in self._idle.items() if count == WINDOW]
        share = {"actor/acted_share": sum(self._shares) / len(self._shares)}
        return share, _warning(late) if late else None

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint, which JSON can represent."""
        return {"shares": list(self._shares), "idle": dict(self._idle)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._shares.extend(state.get("shares", ()))
        self._idle |= {name: count for name, count in state.get("idle", {}).items() if name in self._idle}


def _warning(names: list[str]) -> str:
    advice = MECHANISMS[names[0]][2]
    return f"{' and '.join(names)} changed no step of the last {WINDOW} iterations; {advice}"
