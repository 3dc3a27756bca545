"""Watch whether what the preset is named for changes any step, and whether its critic predicts anything.

A preset whose mechanisms never act trains as the policy gradient alone does, whatever its name says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_stppo.config import AlgorithmConfig

WINDOW = 10  # iterations


@dataclass(frozen=True)
class Mechanism:
    """A column of metrics.jsonl that says whether something works.

    Example: nothing was clipped in WINDOW iterations in a row: "clipping changed no step of ..".
    """

    column: str
    works: Callable[[float], bool]
    text: str  # with what the user can do


LAST = f"of the last {WINDOW} iterations"
CLIPPING = Mechanism(
    "actor/clip_fraction",
    lambda share: share > 0,
    f"clipping changed no step {LAST}; raise update.actor.lr or update.minibatches, or lower "
    "algorithm.clip_low and algorithm.clip_high",
)
SELECTION = Mechanism(
    "actor/selected",
    lambda share: share < 1,
    f"the selection took nothing out of any step {LAST}; raise update.actor.lr, or lower its bounds",
)
CORRECTION = Mechanism(
    "actor/correction_scale",
    lambda scale: scale != 1,
    f"the correction changed no step {LAST}; it acts only where tokens are clipped, and where "
    "algorithm.correction_floor lets it",
)
CONTROLLER = Mechanism(
    "actor/rate_scale",
    lambda factor: factor != 1,
    f"the controller algorithm.rate changed no step {LAST}; raise update.actor.lr, or with rate=kl lower "
    "algorithm.rate_kl",
)
CRITIC = Mechanism(
    "critic/explained_variance",
    lambda share: share >= 0,
    f"the critic predicted returns worse than their mean in each {LAST}; raise update.critic.lr or "
    "update.critic_steps, or begin with update.critic_only or `cold-start --critic`",
)


class Acting:
    """Records which mechanisms changed the steps of the last WINDOW iterations.

    Iterations without an applied step are left out. The warm-up of the rate is not counted as idle.

    Example: of 2 steps each in 10 iterations, 5 in all had a clipped token: actor/acted_share is 0.25.
    """

    def __init__(self, algorithm: AlgorithmConfig, rate: float) -> None:
        """rate: update.actor.lr."""
        configured = {
            "clipping": (CLIPPING, algorithm.clips),
            "selection": (SELECTION, algorithm.loss is None and algorithm.select != "all"),
            "correction": (CORRECTION, algorithm.correction != "off"),
            "controller": (CONTROLLER, algorithm.rate != "constant"),
            "critic": (CRITIC, algorithm.advantage == "gae"),
        }
        self._watched = {name: watched for name, (watched, given) in configured.items() if given}
        self._idle = dict.fromkeys(self._watched, 0)  # iterations in a row
        self._said: set[str] = set()
        self._shares: deque[float] = deque(maxlen=WINDOW)
        self._rate = rate

    def look(self, row: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
        """Record an iteration's row. Return its column actor/acted_share, and warnings.

        A warning comes once for each mechanism, when it has not worked in WINDOW iterations in a row.
        Clipping and correction, which acts only beside it, give one. row["actor/acted_share"] is the share of
        the iteration's own steps; losses in place of the surrogate have none.
        """
        if row.get("actor/held", 1.0) == 1.0:
            return {}, []
        warm = row["actor/lr"] >= self._rate * (1 - 1e-9)
        for name, watched in self._watched.items():
            if watched.works(row[watched.column]):
                self._idle[name] = 0
            elif warm:
                self._idle[name] += 1
        late = [name for name, count in self._idle.items() if count >= WINDOW and name not in self._said]
        self._said |= set(late)
        texts = [self._watched[n].text for n in late if n != "correction" or "clipping" not in late]
        own = row.get("actor/acted_share")
        if own is None:
            return {}, texts
        self._shares.append(own)
        return {"actor/acted_share": sum(self._shares) / len(self._shares)}, texts

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint, which JSON can represent."""
        return {"shares": list(self._shares), "idle": dict(self._idle), "said": sorted(self._said)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._shares.extend(state.get("shares", ()))
        self._idle |= {name: count for name, count in state.get("idle", {}).items() if name in self._idle}
        self._said |= set(state.get("said", ()))
