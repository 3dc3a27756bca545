"""Asynchronous training with two ranks and two replicas, of which a random one is killed, again and again.

Kills come at random times, and at random times within short moments: while weights move, while a checkpoint
or the ledger in it is written. The trainer starts a killed replica again. After a killed rank the others end,
as under torchrun, and the run is resumed.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_stppo.config import Config, DeadlinesConfig
from megatron_stppo.config.file import load
from megatron_stppo.replicas.wire import keys
from tests.chaos import drawn_tasks
from tests.chaos.attempt import ANY_TIME, Attempt, is_started
from tests.chaos.moments import CHECKPOINT, LEDGER, WEIGHTS

RANKS, REPLICAS, ITERATIONS = 2, 2, 8
RANK_NAMES, REPLICA_NAMES = ("rank-0", "rank-1"), ("replica-0", "replica-1")
VICTIMS = {  # by the moment at which one of them dies
    ANY_TIME: (*RANK_NAMES, *REPLICA_NAMES),
    WEIGHTS: (*RANK_NAMES, *REPLICA_NAMES),
    CHECKPOINT: RANK_NAMES,
    LEDGER: ("rank-0",),  # the others write none
}
OF_EIGHT = (ANY_TIME, ANY_TIME, ANY_TIME, WEIGHTS, WEIGHTS, WEIGHTS, CHECKPOINT, LEDGER)  # kills in a row
OVERRIDES = (
    f"run.iterations={ITERATIONS}",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=3",
    "run.evaluate_every=3",
    "evaluate.tasks=2",
    "environment.kind=tests.replicas.late_tools:factory",
    f"parallel.tensor={RANKS}",
    f"serving.replicas={REPLICAS}",
    "serving.max_staleness=2",
    "serving.timeout=20",
    "serving.concurrency=3",
    "rollout.samples_per_task=2",
    "rollout.max_turn_tokens=24",
    "rollout.overlap_tools=true",
    "rollout.engine_tensor=1",
    "rollout.engine_restarts=6",  # in one attempt; then only ranks are killed
    *(f"deadlines.{phase}=300" for phase in DeadlinesConfig.model_fields),
)
TASKS = 4 * (ITERATIONS + 2)  # all that a run can draw
LOST = re.compile(r"replica (\S+) is lost: (.*); ([0-9]+) episodes are played again")


@dataclass
class Toll:
    """What the kills of all runs cost. Times are seconds."""

    undisturbed: float = 0.0  # the last run without kills; the machine's load changes
    ports: int = 0  # at which the ranks listened in that run, at most
    runs: int = 0  # that are complete, without the undisturbed one
    tasks: int = 0  # on which these runs have trained
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)  # by victim and moment
    reassigned: int = 0  # episodes of lost replicas
    replaced: list[float] = field(
        default_factory=list
    )  # from a replica's kill to the join of its replacement
    orphaned: float = 0.0  # the longest time in which the replicas of a killed trainer ended
    stuck: int = 0  # ranks that did not end by themselves within torchrun's time after another was killed

    def __str__(self) -> str:
        waits = sorted(self.replaced)
        took = f"{waits[len(waits) // 2]:.1f} s, at most {waits[-1]:.1f} s" if waits else "-"
        ranks = sum(count for (victim, _), count in self.kills.items() if victim in RANK_NAMES)
        when = ", ".join(f"{self._at(moment)} {moment}" for moment in VICTIMS)
        return (
            f"{self.kills.total()} SIGKILLs: {ranks} of a rank of the trainer, "
            f"{self.kills.total() - ranks} of a replica; {when}; {self.runs} runs of {ITERATIONS} iterations "
            f"({self.undisturbed:.0f} s undisturbed): {self.tasks} tasks were drawn and trained on, none was "
            f"lost, none was trained on twice; {self.reassigned} episodes of killed replicas were played "
            f"again, a replica was replaced in {took} (median of {len(waits)}), the replicas of a killed "
            f"trainer ended within {self.orphaned:.1f} s, {self.stuck} ranks waited for a killed one until "
            "torchrun's SIGKILL"
        )

    def _at(self, moment: str) -> int:
        return sum(count for (_, at), count in self.kills.items() if at == moment)


def kill_often(config: Path, kills: int, seed: int) -> Iterator[Toll]:
    """Start a run without kills, then runs in which a random process is killed at random times within the
    length of that run, until there were `kills` kills. Every run is resumed until it is complete.

    Yields what it has cost so far. Raises AssertionError if a run has trained on other tasks than were drawn,
    if a replica is not replaced or outlives its trainer, or if anything fails that was not killed.
    """
    draw, toll, first = random.Random(seed), Toll(), list[Tokens]()
    moments = [moment for _ in range(0, kills, 8) for moment in draw.sample(OF_EIGHT, 8)][:kills]
    write_tasks(config.parent / "many.jsonl", config.parent / "tasks.jsonl")
    for number in itertools.count():
        order = "completion" if number % 3 == 2 else "admission"
        given, arguments = opened(config, f"served-{number}", order)
        for _ in attempts(given, arguments, draw, toll, moments if number else ()):
            yield toll
        tasks = drawn_tasks.check(given)
        assert not keys.path_of(given.run.folder).exists(), "the connection file is left"
        if order == "admission":  # the first iteration was played at version 0, and depends on nothing else
            first = first or tokens(given, 1)
            assert tokens(given, 1) == first, "other seeds"
        if number:
            toll.runs, toll.tasks = toll.runs + 1, toll.tasks + tasks
        yield toll
        if toll.kills.total() >= kills:
            return


def attempts(
    config: Config, arguments: Sequence[str], draw: random.Random, toll: Toll, moments: Sequence[str]
) -> Iterator[None]:
    """Start the run, kill, and resume it, until it is complete. Yields after each kill.

    moments: of the kills of all runs.
    """
    complete, folder = False, config.run.folder
    while not complete:
        again = is_started(folder)
        attempt = Attempt(config, [*arguments, *(["--resume"] if again else [])])
        try:
            yield from disturb(attempt, draw, toll, moments)
            complete, orphaned, stuck = attempt.end()
        finally:
            attempt.kill_all()
        toll.stuck += stuck
        toll.orphaned = max(toll.orphaned, 0.0 if complete else orphaned)
        if complete and not (again or attempt.deaths):
            toll.undisturbed = attempt.clock.now()
    toll.reassigned += reassigned(folder)


def disturb(attempt: Attempt, draw: random.Random, toll: Toll, moments: Sequence[str]) -> Iterator[None]:
    """Kill until there were len(moments) kills, or a rank has ended. Yields after each kill.

    The time of every other kill begins when all replicas have joined.
    """
    clock, counted, goes_on = attempt.clock, 0, True
    next_kill = draw.uniform(0, toll.undisturbed * 0.75)
    while goes_on:
        goes_on = attempt.goes_on()
        for death in attempt.deaths[counted:]:
            toll.kills[death] += 1
            next_kill = clock.now() + draw.uniform(0, toll.undisturbed / 3)
            yield
        counted = len(attempt.deaths)
        if not moments:
            toll.ports = max(toll.ports, attempt.listening())
        toll.replaced += attempt.replaced(toll.ports)
        if toll.kills.total() % 2 and not attempt.is_full():
            next_kill = clock.now() + draw.uniform(0, toll.undisturbed / 3)
        done = toll.kills.total()
        if goes_on and done < len(moments) and clock.now() > next_kill and attempt.ordered is None:
            strike(attempt, draw, moments[done])
        time.sleep(0.05)


def strike(attempt: Attempt, draw: random.Random, moment: str) -> None:
    """Kill a process, or order its death, if it can be replaced."""
    victim = draw.choice(VICTIMS[moment])
    if moment == ANY_TIME:
        attempt.kill(victim)
    else:
        attempt.order(victim, moment, draw.random())


def opened(config: Path, name: str, order: str, *overrides: str) -> tuple[Config, list[str]]:
    """Return the configuration of a run and the arguments of the program."""
    data = f"data.train={config.parent / 'many.jsonl'}"
    given = [*OVERRIDES, data, f"run.name={name}", f"serving.order={order}", *overrides]
    return load(config, given), ["train", str(config), *given]


def write_tasks(path: Path, source: Path) -> None:
    """Write as many tasks as a run can draw, all different."""
    row = json.loads(source.read_text().splitlines()[0])
    rows = [row | {"extra_info": {"split": "train", "index": index}} for index in range(TASKS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


Tokens = list[list[int]]  # of the turns of an episode


def tokens(config: Config, iteration: int) -> list[Tokens]:
    rows = drawn_tasks.played(config, iteration)
    return [[turn["token_ids"] for turn in row["turns"]] for row in rows]


def reassigned(run: Path) -> int:
    """Return how many episodes of lost replicas were played again."""
    log = (run / "logs" / "rank-0.log").read_text()
    return sum(int(found[3]) for found in LOST.finditer(log))
