"""vLLM on a CPU: its layers, computed directly from the engine's parameters, and its worker.

When vLLM loads a model, it copies linear weights into a layout for oneDNN, and experts' weights into one for
its own kernel. A reshard that writes into the parameters would then not change the result. Its LoRA copies A
and B once per token, because each token could have another adapter: 5 GB for a step of 8,192 tokens, 4,864
rows and rank 32. Here all tokens have one adapter.

The functions set private switches and replace private methods of vLLM for all engines of this process. They
may be called more than once, and are tested with the versions of TESTED_ENGINES.

vLLM derives the name of its CPU all-reduce buffers from the rendezvous address. Under an external launcher
this address is always "env://", so two runs on one host would open each other's buffers; so would a run and
the buffers left by a killed run. The engine therefore passes a token that is the same on all its ranks, and
the token becomes part of the name.

vLLM binds the memory of its process to one NUMA node, and warns of it. In this process are the trainer's
models too, for which one node may be too small, and its threads are not bound either
(VLLM_CPU_OMP_THREADS_BIND=nobind). vLLM imports this module by name (`worker_cls`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_stppo.ops.clamped_swiglu import clamped_swiglu
from megatron_stppo.rollout.vllm.engine_routes import EngineRoutes

TOKEN, ROUTES = "shared_memory_token", "routes"


def plain_linears() -> None:
    """Keep the weights of linear layers and of the head as the parameters have them."""
    setattr(utils, "dispatch_cpu_unquantized_gemm", _plain)  # noqa: B010


def _plain(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = linear


def plain_experts() -> None:
    """Keep the experts' weights as the parameters have them, and compute with these.

    Raises AttributeError if this vLLM has no replaceable experts on a CPU (0.26).
    """
    replaced = cpu_moe.CPUUnquantizedExperts
    setattr(replaced, "process_weights_after_loading", _leave)  # noqa: B010
    setattr(replaced, "apply", _experts)  # noqa: B010


def _leave(experts: Any, layer: torch.nn.Module) -> None:
    """Leave the weights in the layout in which they were created."""


def _experts(
    experts: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: MoEActivation,
    **kwargs: Any,
) -> None:
    """Write the experts' result to output [T, H].

    hidden_states [T, H]; w1 [E, 2 F, H]: gate, then up, or both in turn; w2 [E, H, F]; topk_weights and
    topk_ids [T, k]: the weights and indices of the chosen experts.
    """
    assert activation in ACTIVATIONS and not kwargs["apply_router_weight_on_input"]
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
        inner = linear(hidden_states[token], w1[expert], _bias(experts.w1_bias, expert))
        inner = ACTIVATIONS[activation](inner)
        answer = linear(inner, w2[expert], _bias(experts.w2_bias, expert)) * topk_weights[token, choice, None]
        output.index_add_(0, token, answer.to(output.dtype))


def _bias(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert].data


def _swiglu(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return silu(gate) * up


ACTIVATIONS = {MoEActivation.SILU: _swiglu, MoEActivation.SWIGLUOAI: clamped_swiglu}


def one_adapter() -> None:
    """Compute LoRA as two products of matrices per layer. A x and B A x are rounded to the type of x, as in
    model/adapters.py."""
    setattr(PunicaWrapperCPU, "add_lora_linear", _lora)  # noqa: B010


def _lora(
    wrapper: PunicaWrapperCPU,
    y: Tensor,
    x: Tensor,
    a: tuple[Tensor, ...],
    b: tuple[Tensor, ...],
    scale: float,
    slices: tuple[int, ...],
    **kwargs: Any,
) -> None:
    """Add scale * B A x to y [T, sum(slices)], for each of the layers that are joined.

    x [T, in]; a [1, 1, rank, in] and b [1, 1, out, rank] of each layer.
    """
    if wrapper.no_lora:
        return
    for part, one_a, one_b in zip(y.split(slices, dim=-1), a, b, strict=True):
        part += (x @ one_a[0, 0].t()) @ one_b[0, 0].t() * scale


class NamedCPUWorker(CPUWorker):
    """A worker with a shared-memory name of its engine's own, and without memory binding."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        bind = torch.ops._C.init_cpu_memory_env
        setattr(torch.ops._C, "init_cpu_memory_env", lambda nodes: None)  # noqa: B010
        try:
            super().__init__(*arguments, **named)
        finally:
            setattr(torch.ops._C, "init_cpu_memory_env", bind)  # noqa: B010
        self._passed: Any = self.vllm_config.additional_config

    def init_device(self) -> None:
        # vLLM uses the text after the last ":" as the name. The default process group already exists, so
        # nothing connects to this address.
        self.distributed_init_method = f"env://:{self._passed[TOKEN]}"
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        if self._passed[ROUTES]:
            self.routes = EngineRoutes(self)
        return super().compile_or_warm_up_model()
