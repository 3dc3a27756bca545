"""Cases of the comparison with TRL: models, lengths, sides, starts. Plain data, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

TASKS, STEPS = 8, 4  # per iteration: prompts, optimizer steps


@dataclass(frozen=True)
class Size:
    """The shape of a Qwen3."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int


@dataclass(frozen=True)
class Case:
    """A model and the lengths of its trajectories.

    Example: Case("large-3", Size(...), turn_tokens=64, turns=3).
    size: of a random model; None means the model of the option --model. samples: trajectories per prompt.
    """

    name: str
    size: Size | None
    turn_tokens: int
    turns: int
    samples: int = 8

    @property
    def trajectories(self) -> int:
        """Return the number of trajectories of one iteration."""
        return TASKS * self.samples

    @property
    def written(self) -> int:
        """Return the number of tokens that one iteration generates."""
        return self.trajectories * self.turns * self.turn_tokens


SMALL = Size(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=256)
LARGE = Size(hidden=512, layers=6, heads=8, kv_heads=4, head_dim=64, ffn=1536)
CASES = {
    case.name: case
    for case in (
        Case("small", SMALL, 32, 1),
        Case("large", LARGE, 64, 1),
        Case("small-3", SMALL, 32, 3),
        Case("large-3", LARGE, 64, 3),
        Case("smollm2", None, 32, 1, samples=4),
        Case("smollm2-3", None, 16, 3, samples=4),
    )
}


@dataclass(frozen=True)
class Side:
    """A trainer and what it trains.

    program: "trl" or "ours". lora: the rank of the adapters; 0 means all weights. preset: of our algorithm.
    against: the side of TRL that trains the same; empty where there is none.
    """

    name: str
    program: str
    lora: int = 0
    preset: str = "grpo"
    against: str = ""


SIDES = {
    "trl": Side("TRL", "trl"),
    "ours": Side("megatron-stppo", "ours", against="trl"),
    "trl-lora": Side("TRL, LoRA", "trl", lora=16),
    "ours-lora": Side("megatron-stppo, LoRA", "ours", lora=16, against="trl-lora"),
    "st_ppo": Side("megatron-stppo, ST-PPO with its critic", "ours", preset="st_ppo"),
}


@dataclass(frozen=True)
class Start:
    """How a trainer is started: number of processes, threads of each, and the size of a forward pass.

    `amount` is the number of trajectories (TRL) or tokens (megatron_stppo) per forward pass of a process; 0
    means all of the step.
    """

    processes: int
    threads: int
    amount: int = 0

    @classmethod
    def parse(cls, text: str) -> Start:
        """Example: "2x1" is two processes of one thread each; "1x2/8" takes 8 trajectories at a time."""
        found = re.fullmatch(r"(\d+)x(\d+)(?:/(\d+))?", text)
        if not found or "0" in found.groups()[:2]:
            raise ValueError(f"{text!r} is not PROCESSESxTHREADS[/AMOUNT]; give for example 1x2 or 1x2/8")
        return cls(*(int(group or 0) for group in found.groups()))

    def __str__(self) -> str:
        return f"{self.processes}x{self.threads}" + (f"/{self.amount}" if self.amount else "")
