"""Gated delta nets of vLLM on a CPU, in torch.

vLLM's own kernel for a CPU takes bfloat16 only. The one here takes any type and computes the states in
float32, token by token, so that a result does not depend on how a prompt is cut or which requests run beside
it. vLLM's module of these models also imports image processors, which need torchvision; their text models do
not use them.
"""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.utils import is_torchvision_available
from vllm import ModelRegistry
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

EPS = 1e-6  # of the normalised queries and keys
TORCHVISION = ("", ".io", ".transforms", ".transforms.v2", ".transforms.functional")


class Absent(types.ModuleType):
    """A module that is not installed: every name in it is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def prepare() -> None:
    """Use the functions of this file for all engines of this process. It may be called more than once."""
    with _torchvision():
        qwen3_5 = importlib.import_module("vllm.model_executor.models.qwen3_5")
    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        ModelRegistry.register_model(name, getattr(qwen3_5, name))
    setattr(gdn_attention, "cpu_gdn_attention_core", core)  # noqa: B010


@contextlib.contextmanager
def _torchvision() -> Iterator[None]:
    """Have empty modules in the place of torchvision inside the context, if it is not installed."""
    names = [] if is_torchvision_available() else [f"torchvision{tail}" for tail in TORCHVISION]
    sys.modules |= {name: Absent(name) for name in names}
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Write what the tokens of a step read from the states to core_attn_out [T, value heads, V].

    mixed_qkv [T, channels], before the convolution; b, a [T, value heads]. Updates the states of the step's
    requests. vLLM makes an operation of torch from the annotations.
    """
    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures memory
        return
    metadata: Any = context.attn_metadata[layer.prefix]
    starts = metadata.non_spec_query_start_loc.long()
    slots, lengths = metadata.non_spec_state_indices_tensor.long(), starts.diff()
    requests = metadata.num_decodes + metadata.num_prefills
    starts, slots, lengths = starts[:requests], slots[:requests], lengths[:requests]
    known = torch.ones(requests, dtype=torch.bool)  # whether a request has states of tokens before
    if metadata.num_prefills:
        known[metadata.num_decodes :] = metadata.has_initial_state[metadata.num_decodes : requests]
    seen, states = layer.kv_cache[0], layer.kv_cache[1]  # [slots, width - 1, channels], [slots, heads, V, K]
    before = seen[slots].where(known[:, None, None], 0)
    state = states[slots].float().where(known[:, None, None, None], 0)
    keys = layer.key_dim // layer.tp_size
    rows = (keys, keys, layer.value_dim // layer.tp_size)
    dims = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    decay = (-layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias.float())).exp()
    strength, weight = b.float().sigmoid(), layer.conv1d.weight[:, 0].t()  # [width, channels]
    for step in range(int(lengths.max()) if requests else 0):
        on = (lengths > step).nonzero()[:, 0]
        at = starts[on] + step
        window = torch.cat([before[on], mixed_qkv[at][:, None]], 1)
        before[on] = window[:, 1:]
        y = functional.silu((window * weight).sum(1)).float()
        q, k, v = (x.unflatten(-1, (-1, d)) for x, d in zip(y.split(rows, -1), dims, strict=True))
        q, k = (x * torch.rsqrt(x.square().sum(-1, True) + EPS) for x in (q, k))
        each = v.shape[1] // k.shape[1]
        q, k = (x.repeat_interleave(each, 1) for x in (q * layer.head_k_dim**-0.5, k))
        state[on], read = _token(state[on], q, k, v, decay[at], strength[at])
        core_attn_out[at] = read.to(core_attn_out.dtype)
    seen[slots], states[slots] = before, state.to(states.dtype)


def _token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states [N, heads, V, K] after one token of each of N requests, and what the tokens read from
    them [N, heads, V].

    q, k [N, heads, K], v [N, heads, V], decay and strength [N, heads].
    """
    state = state * decay[..., None, None]
    delta = (v - (state * k[:, :, None]).sum(-1)) * strength[..., None]
    state = state + delta[..., None] * k[:, :, None]
    return state, (state * q[:, :, None]).sum(-1)
