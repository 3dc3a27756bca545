"""A gated delta net as a layer of megatron's models, in place of attention.

megatron-core has one (megatron/core/ssm/gated_delta_net.py), which needs flash-linear-attention, has no
packed sequences, and does not sum the gradient of its norm over tensor ranks without sequence parallelism.

Under tensor parallelism a rank has some of the key heads, and the value heads that share them. Tokens that
trajectories have in common are not shared, because each trajectory has a state of its own (pipeline.py).

On a GPU in bfloat16 it can use kernels of flash-linear-attention and causal-conv1d. None of the former's rule
(0.6.0) adds atomically. Its block sizes are those that are fastest where it first runs; Triton keeps the
choice on the machine's disk. causal-conv1d adds the gradients of its weight atomically, so that only its
forward pass is used.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.families.qwen3_next.delta_net import MIXED, PARTS, DeltaNet
from megatron_stppo.families.qwen3_next.rule import Chunks, gated_delta_rule
from megatron_stppo.model.attention import Sequences
from megatron_stppo.model.layers import wide

Kernel = Callable[[Tensor, Tensor], Tensor | None]
EPS = 1e-6  # of the normalised queries and keys, in transformers and vLLM


@dataclass(frozen=True)
class Kernels:
    """fla_rule: chunk_gated_delta_rule of flash-linear-attention. convolution: causal_conv1d_fn, or None."""

    fla_rule: Callable[..., Any]
    convolution: Callable[..., Tensor] | None

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequences: Sequences) -> Tensor:
        """Return o [P, value heads, V], as gated_delta_rule of normalised q / sqrt(K) and normalised k.

        q, k [P, key heads, K] and v [P, value heads, V] in bfloat16; g and beta [P, value heads] in float32.
        """
        each = v.shape[1] // k.shape[1]  # repeated here: earlier versions of the rule want equal heads
        q, k = (x.repeat_interleave(each, 1) for x in (q, k))
        q, k, v, g, beta = (x.contiguous()[None] for x in (q, k, v, g, beta))
        o, _ = self.fla_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            scale=q.shape[-1] ** -0.5,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=sequences.starts,
        )
        out: Tensor = o[0]
        return out

    def convolve(self, x: Tensor, weight: Tensor, number_P: Tensor) -> Tensor | None:
        """Return what Convolution does of x [P, C] and weight [C, 1, width]; None if causal-conv1d cannot.

        number_P: int32, the number of each token's sequence.
        """
        if self.convolution is None or x.shape[1] % 8 or not 2 <= weight.shape[2] <= 4:
            return None
        # sequences need the channels last: [1, C, P] with stride 1 between channels
        across = x.contiguous()[None].transpose(1, 2)
        return self.convolution(across, weight[:, 0], seq_idx=number_P[None])[0].t()


def chosen(config: Config, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels that model.delta_net chooses; None for torch's operations.

    Raises ConfigError if it is fla, and that is not installed or cannot run.
    """
    if config.model.delta_net == "torch":
        return None
    if missing := _missing(dtype):
        raise ConfigError(f"model.delta_net=fla: {missing}; choose torch")
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    if importlib.util.find_spec("causal_conv1d") is None:
        return Kernels(rule, None)
    return Kernels(rule, importlib.import_module("causal_conv1d").causal_conv1d_fn)


def _missing(dtype: torch.dtype) -> str:
    """Return why the kernels cannot run, or an empty string."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if dtype != torch.bfloat16:
        return f"its kernels are for bfloat16, the model has {str(dtype).removeprefix('torch.')}"
    return "" if importlib.util.find_spec("fla") else "flash-linear-attention is not installed"


class Convolution(torch.autograd.Function):
    """y[t] = sum over n of weight[:, width - 1 - n] * x[t - n], where t - n is in the sequence of t.

    x [P, C], weight [C, 1, width] (one filter per channel), position [P]: index of each token in its
    sequence. It keeps x only; torch's operations would keep a shifted copy of x for every column of the
    weight. kernel: another function of x and weight for y, which may return None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, position: Tensor, kernel: Kernel | None = None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, position)
        given = kernel(x, weight) if kernel is not None else None
        if given is not None:
            return given
        y = torch.zeros_like(x)
        for back, column in enumerate(weight[:, 0].flip(1).unbind(1)):
            y += column * shifted(x, back, position)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, position = ctx.saved_tensors
        of_x, columns = torch.zeros_like(x), []
        for back, column in enumerate(weight[:, 0].flip(1).unbind(1)):
            columns.append((gradient * shifted(x, back, position)).sum(0, dtype=wide(x.dtype)))
            inside = gradient.masked_fill((position < back)[:, None], 0)
            of_x += column * inside.roll(-back, 0)
        return of_x, torch.stack(columns[::-1], 1)[:, None].to(weight.dtype), None, None


def shifted(x: Tensor, back: int, position: Tensor) -> Tensor:
    """Return x [P, C] of the token `back` before each token, and 0 where that is in another sequence."""
    return x.roll(back, 0).masked_fill((position < back)[:, None], 0) if back else x


class Filter(torch.nn.Module):
    """Holds the weight of the convolution, [channels of this rank, 1, width]."""

    def __init__(self, channels: int, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = _sharded(torch.empty(channels, 1, width, dtype=config.params_dtype))


class GatedNorm(torch.nn.Module):
    """RMSNorm over a value head, times silu(gate). All tensor ranks hold the same weight."""

    def __init__(self, size: int, config: TransformerConfig, group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        self.eps, self._group = config.layernorm_epsilon, group

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [P, heads of this rank, V]. Return their type; computed in float32 or better."""
        # Each rank's heads give a part of the weight's gradient; the backward of this copy sums them.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.weight, group=self._group)
        high = x.to(wide(x.dtype))
        normed = high * torch.rsqrt(high.square().mean(-1, keepdim=True) + self.eps)
        scaled = normed.to(gate.dtype) * weight
        return (scaled * functional.silu(gate.to(high.dtype))).to(gate.dtype)


class GatedDeltaNet(MegatronModule):
    """forward() takes [P, 1, H], a part of P under sequence parallelism, and returns the same shape."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        sizes: DeltaNet,
        kernels: Kernels | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config)
        assert pg_collection is not None
        group = pg_collection.tp
        self.sizes, self.tp_group, self._kernels = sizes, group, kernels
        self._groups = sizes.key_heads // group.size()
        heads = sizes.value_heads // group.size()
        shared: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": group,
        }
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, sizes.count(PARTS), gather_output=False, **shared
        )
        self.out_proj = RowParallelLinear(
            sizes.count("v"), config.hidden_size, input_is_parallel=True, skip_bias_add=True, **shared
        )
        self.conv1d = Filter(sizes.count(MIXED) // group.size(), sizes.width, config)
        self.A_log = _sharded(torch.zeros(heads, dtype=wide(config.params_dtype)))  # as in vLLM
        self.dt_bias = _sharded(torch.zeros(heads, dtype=config.params_dtype))
        self.norm = GatedNorm(sizes.value_dim, config, group)
        if config.perform_initialization:
            torch.nn.init.normal_(self.conv1d.weight, std=config.init_method_std)

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        sequences = packed_seq_params.sequences
        assert isinstance(sequences, Sequences)
        projected, _ = self.in_proj(hidden_states)
        selective = self.config.recompute_granularity == "selective"
        if selective and torch.is_grad_enabled():
            mixed = tensor_parallel.checkpoint(lambda x: self._mix(x, sequences), False, projected)
        else:
            mixed = self._mix(projected, sequences)
        out: tuple[Tensor, Tensor | None] = self.out_proj(mixed)
        return out

    def _mix(self, projected: Tensor, sequences: Sequences) -> Tensor:
        """Return [P, 1, value heads * V] of the projections [P, 1, rows]; P are all tokens."""
        rows = self.sizes.each
        by_group = projected[:, 0].unflatten(1, (self._groups, -1))
        mixed, gate, strength, decay = by_group.split(
            [sum(rows[part] for part in MIXED), rows["z"], rows["b"], rows["a"]], dim=2
        )
        read = self._recurrent(mixed.flatten(1), strength.flatten(1), decay.flatten(1), sequences)
        gate = gate.reshape(len(gate), -1, self.sizes.value_dim)
        return self.norm(read, gate).flatten(1)[:, None]

    def _recurrent(self, mixed: Tensor, strength: Tensor, decay: Tensor, sequences: Sequences) -> Tensor:
        """Return what the tokens read from the states, [P, value heads, V]; of torch in float32 or better.

        mixed [P, channels], strength and decay [P, value heads].
        """
        sizes, heads, high, kernels = self.sizes, len(self.A_log), wide(mixed.dtype), self._kernels
        kernel = kernels and partial(kernels.convolve, number_P=sequences.number_P)
        y = functional.silu(Convolution.apply(mixed, self.conv1d.weight, sequences.position_P, kernel))
        rows = [sizes.each[part] for part in MIXED]
        q, k, v = y.unflatten(1, (self._groups, -1)).split(rows, dim=2)
        v = v.reshape(len(v), heads, sizes.value_dim)
        g = -self.A_log.to(high).exp() * functional.softplus(decay.to(high) + self.dt_bias.to(high))
        beta = strength.to(high).sigmoid()
        if kernels:
            return kernels.rule(q, k, v, g, beta, sequences)
        q, k, v = q.to(high), k.to(high), v.to(high)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
        each = sizes.value_heads // sizes.key_heads
        q, k = ((x * scale).repeat_interleave(each, 1) for x, scale in ((q, sizes.key_dim**-0.5), (k, 1.0)))
        return gated_delta_rule(q, k, v, g, beta, sequences.once(Chunks.of_pack))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return megatron's description of this rank's shards. A shard has the rows of consecutive groups, so
        that a checkpoint fits other numbers of tensor ranks."""
        shards: dict[str, Any] = {}
        for name in ("in_proj", "out_proj"):
            shards |= getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        own = {name: p for name, p in self.named_parameters() if not name.startswith(("in_", "out_"))}
        split = {"conv1d.weight": 0, "A_log": 0, "dt_bias": 0}
        return shards | make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            split,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def _sharded(values: Tensor) -> torch.nn.Parameter:
    """Return a parameter of which every tensor rank has other rows."""
    parameter = torch.nn.Parameter(values)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
