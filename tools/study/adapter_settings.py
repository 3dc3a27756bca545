"""The settings of the comparison of all weights with adapters in docs/lora.md, as data."""

from __future__ import annotations

from typing import Any

ITERATIONS = 20
RANKS = (0, 4, 16, 64)  # 0: all weights are trained
ALPHA = 32  # at every rank: in "LoRA Without Regret" the best rate then hardly depends on the rank
LADDERS = {rank: ("0.75", "1.5", "3", "6", "12") for rank in RANKS if not rank}
LADDERS |= {rank: ("1.5", "3", "6", "12", "24", "48") for rank in RANKS if rank}
# {name of the setting: (rank, the actor's learning rate)}
ADAPTED = {f"rank_{rank}_{x}": (rank, float(f"{x}e-4")) for rank in RANKS for x in LADDERS[rank]}


def settings() -> dict[str, dict[str, Any]]:
    """Return {name: fields}. The critic has three times the actor's rate, as in the quickstart.

    Example: rank_16_12 has model.lora.rank=16 and update.actor.lr=12e-4.
    """
    return {
        name: {
            "run.iterations": ITERATIONS,
            "update.epochs": 1,
            "update.actor.lr": rate,
            "update.critic.lr": round(3 * rate, 8),
            **({"model.lora.rank": rank, "model.lora.alpha": ALPHA} if rank else {}),
        }
        for name, (rank, rate) in ADAPTED.items()
    }
