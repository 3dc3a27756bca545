"""Low-rank adapters (LoRA, arXiv 2106.09685) of megatron's parallel linear layers.

An adapter is a child of its layer and adds scale * B A x to the layer's output. A and B are cut as the layer
is. Only A x is communicated between tensor-parallel ranks, which is r numbers per token: it is gathered where
the layer gathers x, and reduced where the layer reduces its output.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_stppo.model.token_model import ValueHead
from megatron_stppo.weights.sharding.low_rank import A, B, adapter_names
from megatron_stppo.weights.sharding.tiles import PADDING, Span, Spans


class Adapter(torch.nn.Module):
    """A and B of one of megatron's layers. They have the type and the device of the layer's weight and
    are zero at first.

    Of a column-parallel layer, A is whole on every rank, and B has the layer's rows. Where the layer joins
    several Hugging Face layers, a has one A under the other, [J r, in], and row i of b applies to the A of
    the layer that the row belongs to. Of a row-parallel layer, A has the layer's columns, and B is whole.
    The parameter that all tensor-parallel ranks hold gets its whole gradient on each of them, or, with
    sequence parallelism, the part of the rank's tokens: `sequence_parallel` has megatron sum these.
    owner: [rows, J]: 1 where row i belongs to the j-th joined layer; None for a row-parallel layer.
    """

    def __init__(
        self, linear: Any, a: tuple[int, int], b: tuple[int, int], owner: Tensor | None, scale: float
    ) -> None:
        super().__init__()
        self.a, self.b = (
            torch.nn.Parameter(linear.weight.new_zeros(size, dtype=linear.config.params_dtype))
            for size in (a, b)
        )
        self.owner: Tensor | None
        self.register_buffer("owner", owner, persistent=False)
        self.scale = scale
        self._sequence, self._group = linear.sequence_parallel, linear.tp_group
        # the parameter that is cut over the tensor-parallel ranks, and its dimension
        self.cut = ("a", 1) if owner is None else ("b", 0)
        part, whole = (self.a, self.b) if owner is None else (self.b, self.a)
        tensor_parallel.set_tensor_model_parallel_attributes(part, True, self.cut[1], 1)
        whole.sequence_parallel = self._sequence  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        low = _product(x, self.a.t())
        b: Tensor = self.b
        if self.owner is None and self._sequence:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=self._group)
        elif self.owner is None:
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=self._group)
        elif self._sequence:
            low = tensor_parallel.gather_from_sequence_parallel_region(low, group=self._group)
        else:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low, group=self._group)
        if self.owner is not None:
            b = (self.owner[:, :, None] * b[:, None, :]).flatten(1)  # [rows, J r]: zero for the other layers
        return _product(low, b.t()) * self.scale


def attach(chunk: torch.nn.Module, spans: Spans, rank: int, scale: float) -> None:
    """Add adapters of this rank to the layers of a model chunk that `spans` name.

    spans: weights.sharding.low_rank.adapter_spans of this chunk, without its prefix. A and B are zero.
    """
    for name, of_a in spans.items():
        linear = name.removesuffix(".adapter.a")
        if linear == name:
            continue
        layer: Any = chunk.get_submodule(linear)
        of_b = spans[adapter_names(linear)[1]]
        a, owner = (rank, _rows(of_a)), None
        if of_a[0].dim == 0:
            a = (_rows(of_a), layer.input_size)
            owner = _owner(of_a, of_b).to(layer.weight.device, layer.config.params_dtype)
        layer.adapter = Adapter(layer, a, (_rows(of_b), rank), owner, scale)
        layer.register_forward_hook(_add)


def adapters(chunk: torch.nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield (name, adapter) of a model chunk."""
    for name, module in chunk.named_modules():
        if isinstance(module, Adapter):
            yield name, module


def uniform(size: Sequence[int], seed: str) -> Tensor:
    """Return a matrix with values of torch's initial linear layers: uniform in +-1 / sqrt(columns).

    The values depend on nothing but size and seed, so that they are equal under every layout.
    """
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    generator = torch.Generator(device="cpu").manual_seed(number)
    values = torch.rand(*size, generator=generator, device="cpu")
    return (2 * values - 1) / math.sqrt(size[1])


def sharded_adapters(chunk: Any) -> dict[str, Any]:
    """Return {parameter name: megatron's sharded tensor} of a model chunk's adapters and value head.

    In the files they have the names of the whole model, so that they can be loaded under another layout.
    """
    head = chunk.post_process and isinstance(chunk.output_layer, ValueHead)
    shards: dict[str, Any] = chunk.output_layer.sharded_state_dict("output_layer.") if head else {}
    for local, layer in enumerate(chunk.decoder.layers):
        for name, adapter in adapters(layer):
            prefix = f"decoder.layers.{layer.layer_number - 1}.{name}."
            own: dict[str, Any] = adapter.state_dict(keep_vars=True)
            tensors = make_sharded_tensors_for_checkpoint(own, prefix, dict([adapter.cut]))
            if name == "mlp.linear_fc1.adapter":  # a rank's rows are some of gate, then some of up
                tensors[f"{prefix}b"] = apply_swiglu_sharded_factory(tensors[f"{prefix}b"], ())
            for key in own:
                shards[f"decoder.layers.{local}.{name}.{key}"] = tensors[prefix + key]
    return shards


def _add(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> tuple[Any, ...]:
    """Hook of a parallel linear layer, whose output is (y, bias or None)."""
    return output[0] + linear.adapter(inputs[0]), output[1]


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x [T, 1, i] times a matrix [i, o] as one product of two matrices.

    torch.matmul would choose between that and a batched product by whether the matrix is trained, and their
    roundings differ: the reference would not have the actor's log-probs.
    """
    return torch.mm(x.flatten(0, -2), matrix).unflatten(0, x.shape[:-1])


def _rows(spans: tuple[Span, ...]) -> int:
    """Return the number of local positions along the dimension of the spans."""
    return spans[-1].local + spans[-1].size


def _owner(of_a: tuple[Span, ...], of_b: tuple[Span, ...]) -> Tensor:
    """Return the `owner` of a column-parallel layer's adapter, in float32."""
    layers = [span.hf_key.replace(A, B) for span in of_a]
    owner = torch.zeros(_rows(of_b), len(layers))
    for span in of_b:
        if span.hf_key != PADDING:
            owner[span.local : span.local + span.size, layers.index(span.hf_key)] = 1.0
    return owner
