"""Lines on stderr while a command runs: the seconds of each step of start-up, and one line per iteration."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_stppo.base.printing import say

# Columns of metrics.jsonl in the order in which a line shows them, and their formats.
COLUMNS = {
    "reward/mean": "reward {:.3f}",
    "rollout/exact_match": "exact match {:.3f}",
    "failed": "failed {:d}",
    "rollout/truncated": "truncated {:.0%}",
    "critic/explained_variance": "critic explains {}",
    "actor/kl_after": "KL {:.1g}",
    "actor/removed_share": "clipped gradient {:.0%}",
    "actor/effective_share": "rate {:.0%}",
    "rollout/tokens_per_second": "{:,.0f} tokens/s",
    "staleness": "staleness {:.2f}",
    "serving/trainer_idle_share": "trainer idle {:.0%}",
    "serving/idle_share": "replicas idle {:.0%}",
    "evaluate/reward": "held-out reward {:.3f}",
    "evaluate/exact_match": "held-out exact match {:.3f}",
    "seconds": "{:.1f} s",
}
ERRORS = {"reward/mean": "reward/standard_error", "evaluate/exact_match": "evaluate/standard_error"}
# A column that is left out where it equals another one, which has an error.
SAME = {"rollout/exact_match": "reward/mean", "evaluate/reward": "evaluate/exact_match"}
EXPLAINED, LOWEST = "critic/explained_variance", -10.0
FAILED = ("outcome/error", "outcome/timeout")
SERVED = "serving/replicas"  # a column of asynchronous runs only


@contextmanager
def timed(name: str, enabled: bool = True) -> Iterator[None]:
    """Print how long the block took. Example: "megatron-stppo: engine 4.2 s"."""
    started = time.perf_counter()
    yield
    say(f"{name} {time.perf_counter() - started:.1f} s", enabled)


class RowLines:
    """A reporter that prints each row of metrics.jsonl as one line, on a terminal and in a log alike.

    Example: "st_ppo 4/6: reward 0.266 ± 0.05, exact match 0.250, failed 0, truncated 0%, 1.6 s".
    """

    def __init__(self, name: str, iterations: int) -> None:
        """`iterations`: the number of the last iteration."""
        self._name, self._iterations = name, iterations

    def write(self, row: Mapping[str, Any]) -> None:
        print(f"{self._name} {row['iteration']}/{self._iterations}: {line(row)}", file=sys.stderr, flush=True)

    def close(self) -> None: ...


def explained(variance: float, digits: int = 3) -> str:
    """Return an explained variance as text. Where returns hardly vary it can be any negative number, which
    says no more than "< -10"."""
    return f"< {LOWEST:g}" if variance < LOWEST else f"{variance:.{digits}f}"


def line(row: Mapping[str, Any]) -> str:
    """Return the row's COLUMNS in their order, without those of SAME. None (not finite) becomes nan."""
    values = {name: value for name, value in row.items() if name not in SAME or value != row.get(SAME[name])}
    if FAILED[0] in row:
        values["failed"] = sum(row[name] for name in FAILED)
    if SERVED in row:  # colocated rollouts are never stale
        values["staleness"] = row["rollout/staleness"]
    shown = {
        name: float("nan") if values[name] is None else values[name] for name in COLUMNS if name in values
    }
    texts = {name: COLUMNS[name].format(value) for name, value in shown.items()}
    if EXPLAINED in shown:
        texts[EXPLAINED] = f"critic explains {explained(shown[EXPLAINED], 2)}"
    for name in ERRORS.keys() & texts.keys():
        if (error := row.get(ERRORS[name])) is not None:
            texts[name] += f" ± {error:.2g}"
    return ", ".join(texts.values())
