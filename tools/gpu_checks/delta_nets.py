"""Gated delta nets: torch's operations, and on a GPU flash-linear-attention's kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.config import Config
from megatron_stppo.families.qwen3_next.delta_net import MIXED, DeltaNet
from megatron_stppo.families.qwen3_next.gated_delta_net import GatedDeltaNet, Kernels, chosen
from megatron_stppo.model.attention import Sequences
from tools.measuring import timed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (70, 1, 64, 5, 130)
# of a tensor rank: a small net, Qwen3.5-9B with short and with long sequences
CASES = {"small": (DeltaNet(8, 2, 6, 16, 16, 4, joined=False), LENGTHS)}
if DEVICE == "cuda":
    NET = DeltaNet(2048, 16, 32, 128, 128, 4, joined=False)
    CASES |= {"9B, 32 of 512": (NET, (512,) * 32), "9B, 2 of 8192": (NET, (8192,) * 2)}


def kernels() -> dict[str, Any]:
    """Return errors of output and gradients in bfloat16 against float64, and milliseconds forward and
    backward. Raises AssertionError if fla's error is above twice torch's, or its bits differ in a repeat, and
    ConfigError if it is not installed on a GPU."""
    way = "fla" if DEVICE == "cuda" else "torch"
    config = Config.model_validate({"model": {"path": "none", "delta_net": way}})
    found, fla = dict[str, Any](), chosen(config, torch.bfloat16)
    ways = {"torch": None} | ({"fla": fla} if fla else {})
    for case, (net, lengths) in CASES.items():
        exact = _results(net, lengths, torch.float64, None)[0] if case == "small" else []
        error = {}
        for way, own in ways.items():
            _results(net, lengths, torch.bfloat16, own)  # warm-up
            values, seconds = _results(net, lengths, torch.bfloat16, own)
            again, _ = _results(net, lengths, torch.bfloat16, own)
            found[f"{case}: {way} ms"] = round(1e3 * seconds, 3)
            error[way] = [float((a - b).norm() / b.norm()) for a, b in zip(values, exact, strict=False)]
            found |= {f"{case}: {way} error": max(error[way])} if error[way] else {}
            same = all(torch.equal(a, b) for a, b in zip(values, again, strict=True))
            assert same, f"{case}: {way} gives other bits when it is repeated"
        if exact and fla:
            assert all(a < 2 * b + 1e-3 for a, b in zip(error["fla"], error["torch"], strict=True)), error
    return found


def _results(
    net: DeltaNet, lengths: tuple[int, ...], dtype: torch.dtype, own: Kernels | None
) -> tuple[list[Tensor], float]:
    """Return the output and all gradients, in float64, and seconds."""
    torch.manual_seed(0)
    tokens, heads = sum(lengths), net.value_heads

    def draw(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(size).bfloat16().to(DEVICE, dtype).requires_grad_()

    of_decay = torch.promote_types(dtype, torch.float32)
    layer: Any = SimpleNamespace(sizes=net, _groups=net.key_heads, _kernels=own, dt_bias=draw(heads))
    layer.A_log = draw(heads, dtype=of_decay)
    layer.conv1d = SimpleNamespace(weight=draw(net.count(MIXED), 1, 4))
    given = draw(tokens, net.count(MIXED)), draw(tokens, heads), draw(tokens, heads)
    position = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE)
    weigh = draw(tokens, heads, net.value_dim).detach()
    seconds = dict[str, float]()
    with timed(seconds, "both"):
        out = GatedDeltaNet._recurrent(layer, *given, Sequences(position, lengths))
        wanted = (*given, layer.A_log, layer.dt_bias, layer.conv1d.weight)
        gradients = torch.autograd.grad((out * weigh).sum(), wanted)
    return [x.detach().double() for x in (out, *gradients)], seconds["both"]
