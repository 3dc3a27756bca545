"""Records of what environments say, and of what replicas ask their engines for.

They are made before the program under test sees an answer, and where vLLM gets a request. A replica writes
them to the run's folder: those of an episode are there before the trainer can get it.
"""

import inspect
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from megatron_stppo.base.types import Message, Outcome, Task
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.environments import contract
from megatron_stppo.environments.base import AnyEnvironment, CompletionEnvironment, Request, StepResult
from megatron_stppo.environments.rewarded import Rewarded
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.rollout.vllm.engine import Engine

FOLDER = "records"  # in the run's folder
Asked = tuple[SamplingParams, bool]  # of a request; and whether it is for the adapter
Open = Callable[[Config, bool], Callable[[], AnyEnvironment]]  # as open_environment


@dataclass
class Said:
    """What the environment of an episode has said. An entry of the lists is for a turn that it has answered.

    Example: Said(7, task, (Message("user", "Guess."),), ("!",), [" hi ", ""], [-7001.25, -7002.25], "ok").
    """

    seed: int  # of the environment
    task: Task
    messages: tuple[Message, ...]
    stop_strings: tuple[str, ...]
    observations: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # those that the program got
    outcome: Outcome | None = None  # set if the environment has ended the episode
    graded: float | None = None  # what the function of environment.reward has returned
    misgraded: str = ""  # what is wrong in its call, or in what becomes of its value


class RecordedEnvironment:
    """An environment whose answers are recorded, before the program under test has seen any of them.

    Every turn gets another reward, of both signs, none of them whole: others could be lost, exchanged or
    rounded unseen. A function that environment.reward names is called with the environment's own.
    """

    def __init__(self, environment: AnyEnvironment, note: Callable[[Said], object]) -> None:
        """note: called with the record whenever it has grown."""
        self._environment, self._note = environment, note
        self._turns, self._reward = list[tuple[str, str]](), 0.0  # the environment's own
        if isinstance(environment, Rewarded):
            self._within = RecordedEnvironment(environment._environment, id)
            self._function = environment._function
            environment._environment, environment._function = self._within, self._grade

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return contract.stop_strings(self._environment)

    async def reset(self, task: Task, seed: int) -> list[Message]:
        messages = await contract.reset(self._environment, task, seed)
        assert not isinstance(messages, Request), "agents are not recorded"
        self._record = Said(seed, task, messages, self.stop_strings)
        self._note(self._record)
        return list(messages)

    async def step(self, action: str) -> StepResult:
        result, record = await contract.step(self._environment, action), self._record
        reward = 1000 * (record.seed % 1000) + len(record.rewards) + 1.25
        reward *= 1 - 2 * (record.seed % 2)
        self._turns.append((action, result.observation))
        self._reward, record.outcome = result.reward, result.outcome
        if record.graded not in (None, result.reward):
            record.misgraded = f"returned {record.graded}, and the reward is {result.reward}"
        record.observations.append("" if result.done else result.observation)
        record.rewards.append(reward)
        self._note(record)
        return replace(result, reward=reward)

    async def _grade(self, task: Task, turns: list[tuple[str, str]], result: StepResult) -> Any:
        """Call the function, and record what is wrong in its arguments."""
        within, record = self._within, self._record
        if turns != within._turns or result.reward != within._record.rewards[-1]:
            record.misgraded = f"gets {turns} and {result.reward}, not {within._turns}"
        value = self._function(task, turns, replace(result, reward=within._reward))
        value = await value if inspect.isawaitable(value) else value
        record.graded = float(value["reward"] if isinstance(value, Mapping) else value)
        return value

    async def close(self) -> None:
        await contract.close(self._environment)


def recorded(make: Callable[[], AnyEnvironment], note: Callable[[Said], object]) -> AnyEnvironment:
    """Return an environment whose answers are recorded, unless it is that of an agent."""
    environment = make()
    agent = isinstance(environment, CompletionEnvironment)
    return environment if agent else RecordedEnvironment(environment, note)


def watch(engine: Engine, note: Callable[[Asked], object]) -> None:
    """Let `note` get the requests of an engine where vLLM gets them, so that nothing comes after."""
    core, ask = engine._core, engine._core.add_request

    def add_request(request: EngineCoreRequest) -> None:
        assert request.sampling_params is not None, "Requests.begin sets them"
        note((request.sampling_params, request.lora_request is not None))
        ask(request)

    core.add_request = add_request


@dataclass
class Recordings:
    """The records of a run, on one rank of the trainer, or of a replica.

    said: what environments have said, by their seed; of the newest episode that has it.
    """

    run: Path  # the run's folder
    said: dict[int, Said] = field(default_factory=dict)
    _ends: dict[Path, int] = field(default_factory=dict)  # of what was read
    _kept: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # not read yet

    def keep(self, kind: str, record: object) -> None:
        """Keep a record of this process, of colocated episodes: "asked" or "said"."""
        self._kept[kind].append(msgspec.json.encode(record).decode())

    def building(self, build: Callable[[], Engine]) -> Engine:
        """Build the engine of a replica, whose requests are written from now on."""
        engine = build()
        if process.rank() == 0:  # the ranks of a replica get the same requests
            watch(engine, partial(self._write, "asked"))
        return engine

    def opening(self, opens: Open, config: Config, resume: bool) -> Callable[[], AnyEnvironment]:
        """Open the environment of a replica, which is written from now on."""
        return partial(recorded, opens(config, resume), partial(self._write, "said"))

    def read(self) -> tuple[list[Asked], list[Said]]:
        """Return what was recorded since the last call, and note what was said. Collective.

        An episode is there once for each answer of its environment.
        """
        asked = [msgspec.json.decode(line, type=Asked) for line in self._lines("asked")]
        said = [msgspec.json.decode(line, type=Said) for line in self._lines("said")]
        self.said |= {record.seed: record for record in said}
        return asked, said

    def _write(self, kind: str, record: object) -> None:
        (self.run / FOLDER).mkdir(exist_ok=True)
        name = f"{kind}-{socket.gethostname()}-{os.getpid()}"
        with (self.run / FOLDER / name).open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def _lines(self, kind: str) -> Iterator[str]:
        new = self._kept.pop(kind, [])
        for path in sorted((self.run / FOLDER).glob(f"{kind}-*")) if process.rank() == 0 else ():
            content = path.read_bytes()[self._ends.get(path, 0) :]
            *lines, rest = content.split(b"\n")  # the rest is being written
            self._ends[path] = self._ends.get(path, 0) + len(content) - len(rest)
            new += [line.decode() for line in lines]
        yield from chain(*gather_records(new, str))
