"""The calls of flash-linear-attention and causal-conv1d, by functions with their arguments that compute the
definition, and when they are chosen."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.families.qwen3_next import gated_delta_net
from megatron_stppo.families.qwen3_next.delta_net import MIXED, DeltaNet
from megatron_stppo.families.qwen3_next.gated_delta_net import EPS, GatedDeltaNet, Kernels, chosen
from megatron_stppo.model.attention import Sequences
from tests.families.qwen3_next.test_rule import by_definition

LENGTHS = (5, 1, 9)
NET = DeltaNet(8, 2, 6, 4, 4, 4, joined=False)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, None]:
    """As that of fla 0.6.0: q, k [1, T, H, K], v [1, T, H, V], g and beta [1, T, H], cu_seqlens int64."""
    assert cu_seqlens is not None and cu_seqlens.dtype == torch.int64 and use_qk_l2norm_in_kernel
    assert len({x.shape[:3] for x in (q, k, v, g, beta)}) == 1 == len(q) and initial_state is None
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
    given = [(q * (k.shape[-1] ** -0.5 if scale is None else scale))[0], *(x[0] for x in (k, v, g, beta))]
    return by_definition(given, tuple(cu_seqlens.diff().tolist()))[None], None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """As that of causal-conv1d 1.6.1: x [B, C, T], channels last, weight [C, width], seq_idx int32."""
    assert x.stride(1) == 1 and x.shape[1] % 8 == x.stride(2) % 8 == 0 and bias is None is activation
    assert seq_idx is not None and seq_idx.dtype == torch.int32 and seq_idx.shape == (len(x), x.shape[2])
    lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    filters = {"weight": weight[:, None], "groups": len(weight), "padding": weight.shape[1] - 1}
    return torch.cat(
        [functional.conv1d(part, **filters)[..., : part.shape[2]] for part in x.split(lengths, 2)], 2
    )


def results(kernels: Kernels | None) -> list[Tensor]:
    """Return what the tokens read from the states, and the gradients of all that it depends on."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64, requires_grad=True)
    net = SimpleNamespace(sizes=NET, _groups=2, _kernels=kernels, A_log=draw(6), dt_bias=draw(6))
    net.conv1d = SimpleNamespace(weight=draw(NET.count(MIXED), 1, 4))
    inputs = draw(sum(LENGTHS), NET.count(MIXED)), draw(sum(LENGTHS), 6), draw(sum(LENGTHS), 6)
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    out = GatedDeltaNet._recurrent(net, *inputs, Sequences(position, LENGTHS))  # type: ignore[arg-type]
    loss = (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
    return [out, *torch.autograd.grad(loss, (*inputs, net.A_log, net.dt_bias, net.conv1d.weight))]


@pytest.mark.parametrize("convolution", [causal_conv1d_fn, None])
def test_the_kernels_get_what_torch_computes_with(convolution: Any) -> None:
    kernels = Kernels(chunk_gated_delta_rule, convolution)
    for own, wanted in zip(results(kernels), results(None), strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-12, rtol=1e-12)


def test_a_convolution_of_other_sizes_is_torchs() -> None:
    x, number = torch.zeros(3, 12), torch.zeros(3, dtype=torch.int32)
    kernels = Kernels(chunk_gated_delta_rule, causal_conv1d_fn)
    assert kernels.convolve(x, torch.zeros(12, 1, 4), number) is None
    assert kernels.convolve(x[:, :8], torch.zeros(8, 1, 5), number) is None


def test_the_kernels_are_chosen_on_a_gpu_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, Any] = {}
    found = SimpleNamespace(util=SimpleNamespace(find_spec=installed.get), import_module=installed.get)
    monkeypatch.setattr(gated_delta_net, "importlib", found)

    def of(name: str, dtype: torch.dtype = torch.bfloat16) -> Kernels | None:
        return chosen(Config.model_validate({"model": {"path": "m", "delta_net": name}}), dtype)

    assert of("torch") is None
    with pytest.raises(ConfigError, match=r"model.delta_net=fla: there is no GPU; choose torch"):
        of("fla")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"fla: flash-linear-attention is not installed"):
        of("fla")
    rule = SimpleNamespace(chunk_gated_delta_rule=1)
    installed |= {"fla": rule, "fla.ops.gated_delta_rule": rule}
    assert of("fla") == Kernels(1, None)  # type: ignore[arg-type]
    installed["causal_conv1d"] = SimpleNamespace(causal_conv1d_fn=2)
    assert of("fla") == Kernels(1, 2) and of("torch") is None  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"fla: its kernels are for bfloat16, the model has float32"):
        of("fla", torch.float32)
