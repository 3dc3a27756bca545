"""Watch whether what the preset is named for acts, whether it freezes the run, and what the critic explains.

A preset whose mechanisms never act trains as the policy gradient alone does, whatever its name says. One
whose mechanisms act all the time trains at a small part of the configured rate.
"""

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_stppo.config import AlgorithmConfig

WINDOW = 10  # iterations


@dataclass(frozen=True)
class Watch:
    """A column of metrics.jsonl, and what to say if its values of the last WINDOW iterations are wrong."""

    column: str
    wrong: Callable[[list[float]], bool]
    text: str


LAST = f"of the last {WINDOW} iterations"
PLAIN = "nothing is wrong if rewards rise, but the run is what it would be without it"
WATCHED = {
    "clipping": Watch(
        "actor/clip_fraction",
        lambda shares: not any(shares),
        f"clipping changed no step {LAST}; {PLAIN}",
    ),
    "selection": Watch(
        "actor/selected",
        lambda shares: min(shares) == 1,
        f"the selection took nothing out of any step {LAST}; {PLAIN}",
    ),
    "correction": Watch(
        "actor/correction_scale",
        lambda scales: all(scale == 1 for scale in scales),
        f"the correction changed no step {LAST}; it acts only where tokens are clipped, and where "
        "algorithm.correction_floor lets it",
    ),
    "controller": Watch(
        "actor/rate_scale",
        lambda factors: all(factor == 1 for factor in factors),
        f"the controller algorithm.rate changed no step {LAST}; {PLAIN}",
    ),
    "rate": Watch(
        "actor/effective_share",
        lambda shares: statistics.fmean(shares) < 0.3,
        f"the run is nearly frozen: the steps {LAST} had less than 30 % of the configured rate. Compare "
        "actor/correction_scale and actor/rate_scale: the policy moves further in a step than the bounds, or "
        "algorithm.rate_kl, allow; lower update.actor.lr, or take fewer steps from the same rollouts",
    ),
    "critic": Watch(
        "critic/explained_variance",
        lambda shares: statistics.fmean(shares) < 0.05,
        f"the critic explained less than 5 % of the variance of the returns {LAST}; raise update.critic.lr "
        "or update.critic_steps, or begin with update.critic_only or `cold-start --critic`",
    ),
}


class Acting:
    """Keeps columns of the last WINDOW iterations that applied a step. The rate's warm-up is left out."""

    def __init__(self, algorithm: AlgorithmConfig, rate: float) -> None:
        """rate: update.actor.lr."""
        applies = {
            "clipping": algorithm.clips,
            "selection": algorithm.loss is None and algorithm.select != "all",
            "correction": algorithm.correction != "off",
            "controller": algorithm.rate != "constant",
            "rate": algorithm.correction != "off" or algorithm.rate == "kl",
            "critic": algorithm.advantage == "gae",
        }
        self._values = {name: deque[float](maxlen=WINDOW) for name, it_does in applies.items() if it_does}
        self._said: set[str] = set()
        self._rate = rate

    def look(self, row: Mapping[str, Any]) -> list[str]:
        """Record an iteration's row. Return warnings, each once in a run.

        Clipping and correction, which acts only beside it, give one. A column that the row lacks, because its
        value would mean nothing, is not recorded.
        """
        if row.get("actor/held", 1.0) == 1.0 or row["actor/lr"] < self._rate * (1 - 1e-9):
            return []
        late = []
        for name, values in self._values.items():
            value = row.get(WATCHED[name].column)
            if value is not None:
                values.append(value)
            if len(values) == WINDOW and WATCHED[name].wrong([*values]) and name not in self._said:
                late.append(name)
        self._said |= set(late)
        return [WATCHED[name].text for name in late if name != "correction" or "clipping" not in late]

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint, which JSON can represent."""
        return {
            "values": {name: list(values) for name, values in self._values.items()},
            "said": sorted(self._said),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, values in state.get("values", {}).items():
            if name in self._values:
                self._values[name].extend(values)
        self._said |= set(state.get("said", ()))
