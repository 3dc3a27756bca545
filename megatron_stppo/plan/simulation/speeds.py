"""How fast an engine steps and a trainer trains."""

from __future__ import annotations

from dataclasses import dataclass

PREFILL = 8192  # most tokens of one step, as rollout/vllm_setup.py sets them


@dataclass(frozen=True)
class EngineSpeed:
    """The time of one engine step, a linear function of what the step computes. All times are in seconds.

    Every running sequence gets one token per step. A step with 10 running sequences of 100 tokens each and no
    prompt takes step + 10 sequence + 1000 context seconds.
    """

    step: float  # of every step
    sequence: float = 0.0  # for every running sequence
    prefill: float = 0.0  # for every token of a prompt or an observation
    context: float = 0.0  # for every token before the new one, of every running sequence
    most_sequences: int = 256  # running sequences; others wait
    most_tokens: int = PREFILL  # of a step; longer prompts take several steps

    def elapsed(self, steps: int, running: int, context: int, prefill: int) -> float:
        """Return the seconds of `steps` steps.

        context: tokens of all running sequences before the first step; each step adds one per sequence.
        prefill: tokens of prompts, all of them in the first step.
        """
        each = self.step + self.sequence * running + self.context * context
        growth = self.context * running * (steps * (steps - 1) / 2)
        return steps * each + growth + self.prefill * prefill


@dataclass(frozen=True)
class TrainerSpeed:
    """The time from a complete batch to new weights: scores, advantages and updates.

    Example: TrainerSpeed(0.5, 1e-4) trains on 10,000 tokens in 1.5 s.
    """

    batch: float  # seconds for every batch
    token: float = 0.0  # seconds for every token of the batch, prompts and observations included

    def seconds(self, tokens: int) -> float:
        return self.batch + self.token * tokens
