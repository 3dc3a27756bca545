"""Records what the environment says in the episodes that the engine plays, and replaces its rewards.

The record is made before the program under test has seen any of it. Every turn gets another reward, because
rewards that are all 0 could be lost or exchanged unseen.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from megatron_stppo.base.types import Message, Task
from megatron_stppo.environments import contract
from megatron_stppo.environments.base import AnyEnvironment, CompletionEnvironment, Request, StepResult
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.training.colocated import Worker
from megatron_stppo.training.rollouts import Rollouts


@dataclass(frozen=True)
class Said:
    """What the environment of an episode has said. An entry of the lists is for a turn that it has answered.

    Example: Said(7, (Message("user", "Guess."),), ("!",), [" higher ", ""], [7001.0, 7002.0]) of two turns.
    """

    seed: int  # of the environment
    messages: tuple[Message, ...]
    stop_strings: tuple[str, ...]
    observations: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # those that the program got


class RecordedEnvironment:
    """An environment whose answers are recorded."""

    def __init__(self, environment: AnyEnvironment, records: dict[int, Said]) -> None:
        self._environment, self._records = environment, records

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return contract.stop_strings(self._environment)

    async def reset(self, task: Task, seed: int) -> list[Message]:
        messages = await contract.reset(self._environment, task, seed)
        assert not isinstance(messages, Request), "agents are not recorded"
        self._record = self._records[seed] = Said(seed, messages, self.stop_strings)
        return list(messages)

    async def step(self, action: str) -> StepResult:
        result, record = await contract.step(self._environment, action), self._record
        reward = float(1000 * (record.seed % 1000) + len(record.rewards) + 1)
        record.observations.append("" if result.done else result.observation)
        record.rewards.append(reward)
        return replace(result, reward=reward)

    async def close(self) -> None:
        await contract.close(self._environment)


@contextmanager
def recording(rollouts: Rollouts) -> Iterator[dict[int, Said]]:
    """Context in which the environments of colocated episodes are recorded, by the seed of the episode.

    The records of all ranks are there at its end. It stays empty for replicas, whose environments are in
    other processes, and for agents. Collective.
    """
    records: dict[int, Said] = {}
    if not isinstance(rollouts, Worker):
        yield records
        return
    make = rollouts.make_environment
    rollouts.make_environment = lambda: _recorded(make, records)
    try:
        yield records
    finally:
        rollouts.make_environment = make
    for of_rank in gather_records(list(records.values()), Said):
        records |= {record.seed: record for record in of_rank}


def _recorded(make: Callable[[], AnyEnvironment], records: dict[int, Said]) -> AnyEnvironment:
    environment = make()
    agent = isinstance(environment, CompletionEnvironment)
    return environment if agent else RecordedEnvironment(environment, records)
