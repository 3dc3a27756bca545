"""Implementations that the ops are compared with: those of other projects, and float64 references."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CLIP = 0.2


def token_ppo(logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, mask_T: Tensor) -> tuple[Tensor, ...]:
    """Return (loss, clip fraction, k1, k3) of token-level PPO, as trainers compute it in every step.

    Two simplifications favour them: there is no padding and no observation token, and autograd does not
    record the monitors.
    """
    delta_T = (logprob_T - old_T).clamp(-20, 20)
    ratio_T = delta_T.exp()
    plain_T, clipped_T = -advantage_T * ratio_T, -advantage_T * ratio_T.clamp(1 - CLIP, 1 + CLIP)
    loss = masked_mean(torch.maximum(plain_T, clipped_T), mask_T)
    with torch.no_grad():
        clip_fraction = masked_mean((clipped_T > plain_T).float(), mask_T)
        k1 = masked_mean(-delta_T, mask_T)
        k3 = masked_mean(delta_T.expm1() - delta_T, mask_T)
    return loss, clip_fraction, k1, k3


def bare_ppo(logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, mask_T: Tensor) -> tuple[Tensor, ...]:
    """Return the loss of minimal token-level PPO: no mask, no monitors, no guard against overflow."""
    ratio_T = (logprob_T - old_T).exp()
    kept_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(1 - CLIP, 1 + CLIP) * advantage_T)
    return (-kept_T.mean(),)


def masked_mean(value_T: Tensor, mask_T: Tensor) -> Tensor:
    return (value_T * mask_T).sum() / mask_T.sum()


def exact_ppo(
    logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, offsets: Tensor | None, power: float = 0.0
) -> list[Tensor]:
    """Return [loss, d loss / d logprob] in float64. With `offsets`, a turn's ratio is its geometric mean, and
    CLIP n^-power the bounds of a turn of n tokens."""
    x = logprob_T.detach().double().requires_grad_()
    delta_T, clip = x - old_T.double(), torch.full_like(x.detach(), CLIP)
    if offsets is not None:
        length_S = offsets.diff()
        segment_T = torch.arange(len(length_S), device=x.device).repeat_interleave(length_S)
        sum_S = torch.zeros(len(length_S), dtype=x.dtype, device=x.device).index_add(0, segment_T, delta_T)
        delta_T = (sum_S / length_S.clamp(min=1))[segment_T]
        clip = CLIP * length_S.double()[segment_T] ** -power
    ratio_T, advantage_T = delta_T.exp(), advantage_T.double()
    bounded_T = ratio_T.clamp(1 - clip, 1 + clip)
    loss = -torch.minimum(ratio_T * advantage_T, bounded_T * advantage_T).mean()
    return [loss.detach(), *torch.autograd.grad(loss, x)]


def gather_logprob(logits: Tensor, target_T: Tensor) -> Tensor:
    """Return log-probs by log_softmax in the logits' dtype, then gather."""
    return logits.log_softmax(-1).gather(1, target_T[:, None]).squeeze(1)


def gather_logprob_float32(logits: Tensor, target_T: Tensor) -> Tensor:
    """Return log-probs by log_softmax in float32, as trainers do for bfloat16 logits."""
    return gather_logprob(logits.float(), target_T)


def gather_logprob_entropy(logits: Tensor, target_T: Tensor) -> Tensor:
    """Return log-probs, and compute the entropy only for its cost, because our op returns it too."""
    log_p = logits.float().log_softmax(-1)
    with torch.no_grad():
        (log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, target_T[:, None]).squeeze(1)


@functools.cache
def no_compiler(quick: bool, device: str) -> str:
    """Return the reason why torch.compile is not measured, or an empty string if it is."""
    if quick and device == "cpu":
        return "left out by --quick: compiling takes longer than all the rest"
    if os.environ.get("TORCHDYNAMO_DISABLE", "0") not in ("", "0"):
        return "TORCHDYNAMO_DISABLE is set"
    try:
        x = torch.ones(64, device=device, requires_grad=True)
        torch.autograd.grad(torch.compile(lambda x: (x.exp() * 2).sum())(x), x)
    except Exception as error:  # for example no g++, no Triton or a newer Python: report it as the reason
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:120]}"
    return ""


def vocab_opponents(device: str) -> dict[str, Callable[[Tensor, Tensor], Tensor] | str]:
    """Return {name: function (logits [T, V], target [T]) -> logprob [T], or the reason why it is missing}."""

    def liger() -> Callable[[Tensor, Tensor], Tensor]:
        function = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy
        return lambda logits, target_T: -_first(function(logits, target_T, reduction="none"))

    def quack() -> Callable[[Tensor, Tensor], Tensor]:
        function = importlib.import_module("quack.cross_entropy").cross_entropy
        return lambda logits, target_T: -_first(function(logits, target_T, reduction="none"))

    out = {"megatron-core": _found("megatron.core", lambda: _megatron(device))}
    out["liger-kernel"] = _found("liger_kernel", liger, device)
    out["quack"] = _found("quack", quack, device)
    return out


def linear_opponents(device: str) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor] | str]:
    """Return {name: function or the reason why it is missing}.

    A function maps hidden [T, H], weight [V, H] and target [T] to logprob [T].
    """

    def cut() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        return lambda hidden, weight, target_T: -function(hidden, weight, target_T, reduction="none")

    return {"cut-cross-entropy": _found("cut_cross_entropy", cut, device)}


def _found(module: str, load: Callable[[], Any], device: str = "cuda") -> Any:
    try:
        present = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        present = False
    if not present:
        return "not installed"
    if device != "cuda":
        return "runs on GPUs only"
    try:
        return load()
    except Exception as error:  # installed but unusable: the table shows the reason
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"


def _megatron(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return megatron-core's vocab-parallel cross entropy over a process group of size 1."""
    with warnings.catch_warnings(action="ignore"):  # about Apex and TransformerEngine
        from megatron.core import parallel_state

    module = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()

    def logprob(logits: Tensor, target_T: Tensor) -> Tensor:
        return -module.vocab_parallel_cross_entropy(logits[:, None], target_T[:, None]).squeeze(1)

    return logprob


def _first(value: Tensor | Sequence[Tensor]) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]
