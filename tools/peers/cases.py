"""Cases of the comparison with TRL: models, lengths, and starts of a trainer. Plain data, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

TASKS, SAMPLES, STEPS = 8, 8, 4  # per iteration: prompts, trajectories per prompt, optimizer steps
TRAJECTORIES = TASKS * SAMPLES


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
    """One row of the table. Example: Case("large-3", Size(...), turn_tokens=64, turns=3)."""

    name: str
    size: Size
    turn_tokens: int
    turns: int

    @property
    def written(self) -> int:
        """Return the number of tokens that one iteration generates."""
        return TRAJECTORIES * self.turns * self.turn_tokens


SMALL = Size(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=256)
LARGE = Size(hidden=512, layers=6, heads=8, kv_heads=4, head_dim=64, ffn=1536)
CASES = {
    case.name: case
    for case in (
        Case("small", SMALL, 32, 1),
        Case("large", LARGE, 64, 1),
        Case("small-3", SMALL, 32, 3),
        Case("large-3", LARGE, 64, 3),
    )
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
