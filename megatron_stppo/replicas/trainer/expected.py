"""What a replica must have in common with the trainer, and what it can send."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from megatron_stppo.replicas.trainer import trajectory_check
from megatron_stppo.replicas.wire.messages import Done, Hello

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

SHOWN = 16  # characters of a value that differs, such as a hash
# What must be equal, and what to do if it is not.
REMEDIES = {
    "model": "copy model.path from the trainer's machine: shape, tokenizer or end-of-text ids differ",
    "vocabulary": "copy model.path from the trainer's machine",
    "dtype": "set model.dtype for the run; auto differs between machines with and without a GPU",
    "vllm": "install the trainer's packages",
}


@dataclass(frozen=True)
class Expected:
    """What a replica must have in common with the trainer, and the largest episode.

    Example: Expected("3f..", 151936, "bfloat16", "0.32.0", 32768).
    """

    model: str  # model_digest()
    vocabulary: int
    dtype: str
    vllm: str  # version
    max_context: int  # tokens
    experts: int = 0  # of a layer
    routes: tuple[int, int] = (0, 0)  # layers and experts per token if replicas record experts
    tensor: frozenset[int] = frozenset({1})  # numbers of ranks over which vLLM can shard the model

    def refusal(self, hello: Hello) -> str:
        """Return why a replica is refused, or ""."""
        if not NAME.fullmatch(hello.name):
            return f"--name={hello.name[:80]!r}: give 1 to 64 letters, digits, '.', '_' or '-'"
        if hello.tensor not in self.tensor or hello.capacity < 1:
            return (
                f"rollout.engine_tensor={hello.tensor}, serving.concurrency={hello.capacity} of the replica "
                f"{hello.name}: no replica of this model has them; choose an engine_tensor of "
                f"{sorted(self.tensor)} and a concurrency of at least 1"
            )
        for name, remedy in REMEDIES.items():
            mine, theirs = getattr(self, name), getattr(hello, name)
            if mine != theirs:
                of_replica, of_trainer = (str(value)[:SHOWN] for value in (theirs, mine))
                return (
                    f"{name}={of_replica} of the replica {hello.name} differs from the trainer's "
                    f"{of_trainer}; {remedy}"
                )
        return ""

    def fault(self, done: Done, held: Collection[int]) -> str:
        """Return why an episode is not possible, or "". held: versions that the replica may have."""
        return trajectory_check.fault(
            done,
            held=held,
            vocabulary=self.vocabulary,
            max_context=self.max_context,
            experts=self.experts,
            routes=self.routes,
        )
