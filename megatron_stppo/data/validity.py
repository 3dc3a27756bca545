"""What holds for every trajectory and every batch.

A replica's message and a line of a file are both checked as trajectories. There numbers that are not finite
pass: the update refuses their batch (`not_finite`).
"""

from dataclasses import fields

import torch
from torch import Tensor

from megatron_stppo.base.types import FAILED, Batch, Trajectory, Turn


def episode_fault(played: Trajectory) -> str:
    """Return why the outcome, the number of turns and the counts do not fit together, or ""."""
    turns = len(played.turns) + sum(len(branch.turns) for branch in played.branches)
    if not played.turns and (played.branches or played.outcome not in FAILED):
        return f"no turns, but the outcome {played.outcome}"
    if not 0 <= played.valid_actions <= turns:
        return f"{played.valid_actions} valid actions in {turns} turns"
    if played.tool_calls < 0 or played.overlong_prompt < 0:
        return "a negative number of tool calls or prompt tokens"
    if played.overlong_prompt and (turns or played.outcome not in FAILED):
        return "a prompt that is too long was played"
    if played.turns and not played.prompt_ids:
        return "turns without a prompt"
    return ""


def turn_fault(turn: Turn, vocabulary: int) -> str:
    """Return which lists of a turn do not fit together, or which token the model does not have, or ""."""
    tokens = len(turn.token_ids)
    if not tokens:
        return "no tokens"
    if len(turn.rollout_logprob) != tokens:
        return f"{len(turn.rollout_logprob)} log-probs of {tokens} tokens"
    if sum(count for _, count in turn.versions) != tokens:
        return f"versions of another number of tokens than {tokens}"
    return ids_fault("turn", turn.token_ids, vocabulary) or ids_fault(
        "observation", turn.observation_ids, vocabulary
    )


def ids_fault(where: str, ids: tuple[int, ...], vocabulary: int) -> str:
    """Return that an id is no token of a model with `vocabulary` tokens, or "".

    Example: ids_fault("prompt", (5, 300), 259) is "prompt: a token id above 258".
    """
    if ids and max(ids) >= vocabulary:
        return f"{where}: a token id above {vocabulary - 1}"
    return f"{where}: a token id below 0" if ids and min(ids) < 0 else ""


def not_finite(batch: Batch) -> list[str]:
    """Return a description of each column with numbers that are not finite: rewards, log-probs, values or
    advantages of live action tokens.

    Failed trajectories are not checked, because they carry no loss.
    Example: ["reward_T: 1 of 40 not finite"].
    """
    live_T, found = batch.live_T, []
    for name, value in columns(batch).items():
        if name.endswith("_T") and value.is_floating_point():
            bad = int((~torch.isfinite(value[live_T])).sum())
            found += [f"{name}: {bad} of {int(live_T.sum())} not finite"] if bad else []
    return found


def columns(batch: Batch) -> dict[str, Tensor]:
    """Return the batch's tensors by name."""
    every = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in every.items() if isinstance(value, Tensor)}
