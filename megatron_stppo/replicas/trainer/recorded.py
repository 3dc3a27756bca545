"""The trainer's part of a recorded run: which replica played each episode, and the groups of each batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_stppo.config import ConfigError
from megatron_stppo.replicas.trainer.groups import Taken
from megatron_stppo.replicas.wire import journal

BATCHES = Path("serving", "batches.jsonl")


@dataclass(frozen=True)
class Recorded:
    """What a repetition of the run in the folder `run` follows.

    Example: Recorded(run, ["replica-0"], {0: "replica-0", -1: "replica-0"}, [Taken([0])]) is a run of one
    batch of one group, and an evaluation of one episode.
    """

    run: Path
    names: Sequence[str]  # of the replicas
    played: Mapping[int, str] = field(default_factory=dict)  # {number of an episode: name of its replica}
    batches: Sequence[Taken] = ()


def read(run: Path) -> Recorded:
    """Return the record of an asynchronous run.

    Raises ConfigError if `run` was not asynchronous, if it was resumed, or if it lost a replica: what was
    played after that depended on the moment of the loss.
    """
    names = sorted(path.stem for path in (run / journal.FOLDER).glob("*.jsonl"))
    if not names:
        raise ConfigError(f"RUN_DIR={run}: has no {journal.FOLDER}; give an asynchronous run")
    if len(list((run / "configs").glob("attempt-*.yaml"))) > 1:
        raise ConfigError(f"RUN_DIR={run}: was resumed, so its journal is not complete; give another run")
    played: dict[int, str] = {}
    for name in names:
        for line in journal.read(run, name):
            for number in line.assigned:
                if number in played:
                    raise ConfigError(
                        f"RUN_DIR={run}: {played[number]} and {name} have both played episode {number}, so a "
                        "replica was lost, at a moment that is not recorded; give another run"
                    )
                played[number] = name
    return Recorded(run, names, played, list(journal.read_lines(run / BATCHES, Taken)))


def write_batch(run: Path, iteration: int, taken: Taken) -> None:
    """Append the groups of a batch to the record of the run. The first iteration begins a new record."""
    with (run / BATCHES).open("a" if iteration else "w", encoding="utf-8") as file:
        file.write(json.dumps({"iteration": iteration} | asdict(taken)) + "\n")
