"""Measure the cost of the endpoint for agents: the quickstart's rollouts, built in and by an agent.

    make quickstart-agent                            # builds the model and the data
    PYTHONPATH=examples/agents python -m torch.distributed.run --standalone --nproc-per-node=2 \
        tools/measure_agents.py [--repeats 7] [--config FILE] [section.field=value ...]

The same engine plays the same tasks with the same seeds, in turn with the environment of the package and with
that of the configuration. Prints a Markdown table with medians over the repeats: generated tokens per second
of the rollout, and processor time of all ranks in seconds. Then prints whether all tokens of both are equal.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stppo.config import Config
from megatron_stppo.config_file import load
from megatron_stppo.launch import process

CONFIG = Path(__file__).parents[1] / "examples" / "quickstart" / "agent.yaml"
BUILT_IN = (
    "environment.kind=search",
    "environment.agent=null",
    "environment.max_turns=3",
    "environment.retrieval.kind=bm25",
    "environment.retrieval.index=runs/quickstart-agent/data/index",
    "environment.retrieval.topk=1",
)


@dataclass(frozen=True)
class Share:
    """What one rank has used and got in a rollout. digest: of all its ids."""

    processor_seconds: float
    tokens: int  # generated
    digest: str


@dataclass(frozen=True)
class Rollout:
    seconds: float
    shares: Sequence[Share]  # by rank

    @property
    def tokens(self) -> int:
        return sum(share.tokens for share in self.shares)

    @property
    def speed(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds

    @property
    def processor_seconds(self) -> float:
        return sum(share.processor_seconds for share in self.shares)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    given = parser.parse_args()
    agent = load(given.config, given.overrides)
    built_in = load(given.config, [*given.overrides, *BUILT_IN])
    process.prepare()
    measured = measure(agent, built_in, given.repeats)
    if process.rank() == 0:
        show(measured)
    return 0


def measure(agent: Config, built_in: Config, repeats: int) -> dict[str, list[Rollout]]:
    """Play in turn with both. The first rollouts warm up and are left out."""
    from megatron_stppo.endpoint.opening import open_environment
    from megatron_stppo.worker import assemble

    worker = assemble(agent, training=False)
    makers = {"built in": open_environment(built_in, False), "agent": worker.make_environment}
    worker.publish(0)
    assert worker.cursor is not None
    drawn = worker.cursor.take(agent.rollout.tasks_per_iteration)
    found: dict[str, list[Rollout]] = {name: [] for name in makers}
    for repeat in range(repeats + 1):
        for name, make in makers.items():
            worker.make_environment = make
            rollout = play(worker, drawn)
            found[name] += [rollout] if repeat else []
    worker.close()
    return found


def play(worker: Any, drawn: Sequence[Any]) -> Rollout:
    import torch.distributed as dist

    from megatron_stppo.parallel.collectives import gather_records
    from megatron_stppo.rollouts import rollout_settings, seed_of

    config = worker.learner.config
    settings, seed = rollout_settings(config), seed_of(config.run, 0)
    dist.barrier()
    began, processor = time.perf_counter(), time.process_time()
    played = worker.play(drawn, config.rollout.samples_per_task, settings, seed)
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    ids = [[t.prompt_ids, *((s.token_ids, s.observation_ids) for s in t.turns)] for t in played.own]
    tokens = sum(len(turn.token_ids) for trajectory in played.own for turn in trajectory.turns)
    share = Share(processor, tokens, hashlib.blake2b(repr(ids).encode()).hexdigest())
    return Rollout(seconds, [one for (one,) in gather_records([share], Share)])


def show(measured: dict[str, list[Rollout]]) -> None:
    def median(name: str, of: Callable[[Rollout], float]) -> float:
        return statistics.median(map(of, measured[name]))

    speed = {name: median(name, lambda rollout: rollout.speed) for name in measured}
    used = {name: median(name, lambda rollout: rollout.processor_seconds) for name in measured}
    print("| environment | tokens/s | processor seconds of a rollout | tokens of a rollout |")
    print("|---|---|---|---|")
    for name, rollouts in measured.items():
        print(f"| {name} | {speed[name]:,.0f} | {used[name]:.3f} | {rollouts[-1].tokens:,} |")
    print(
        f"agent / built in: {speed['agent'] / speed['built in']:.2f} of the tokens/s, "
        f"{used['built in'] / used['agent']:.2f} of the tokens per processor second"
    )
    digests = {tuple(share.digest for share in rollout.shares) for of in measured.values() for rollout in of}
    print(f"all tokens of both are equal: {len(digests) == 1}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
