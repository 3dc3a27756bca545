"""Describes the tensors of a checkpoint: weights and optimizer states, with their names in the files.

The names are those of the whole model, whichever rank and chunk holds a tensor, so that a checkpoint can be
loaded with another layout. The optimizer states of one rank are rectangular pieces of the whole model's
tensors.

megatron's distributed optimizer gives a rank a range of the elements of each parameter, which can begin and
end within a row. megatron's format fully_reshardable, which another layout can load, needs whole tensors:
every rank gathers the states of all data-parallel ranks, which takes up to 30 bytes of its host memory for
every parameter of its model shard. But a range is a few rectangles, and the files may hold any rectangles. So
each rank saves and loads what it holds, without communication. The files have the names and the shapes of
fully_reshardable.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_stppo.model.adapters import sharded_adapters
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.token_model import TokenModel

STATES = ("param", "exp_avg", "exp_avg_sq")  # float32 weights and Adam's moments

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # (index of the first element, shape)


def saved_tensors(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    """Return the sharded tensors of a trainer: its weights and its optimizer's states.

    is_loading: whether they are to be filled from a checkpoint.
    """
    model = saved_weights(trainer.chunks)
    if trainer.settings.distributed:
        return {"model": model, "pieces": state_pieces(trainer.optimizer, model)}
    # the same names in the files, whether or not experts have an optimizer of their own
    names = {"chained_optim_avoid_prefix": True}
    whole = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=names)
    return {"model": model, "optimizer": whole}


def saved_weights(model: Sequence[TokenModel]) -> dict[str, Any]:
    """Return the sharded tensors of every chunk, with adapters only these. In the files they are named as in
    the whole model, whichever rank and chunk holds them."""
    return {
        f"chunk_{number}": sharded_adapters(chunk) if chunk.adaptation else chunk.sharded_state_dict()
        for number, chunk in enumerate(model)
    }


def fill(model: Sequence[TokenModel], loaded: dict[str, Any]) -> None:
    """Load the tensors of `saved_weights`, read from a checkpoint, into the chunks of a model."""
    for number, chunk in enumerate(model):
        tensors = loaded[f"chunk_{number}"]
        missing = set(chunk.load_state_dict(tensors, strict=not chunk.adaptation).missing_keys)
        assert not [n for n, p in chunk.named_parameters() if p.requires_grad and n in missing]


def rectangles(shape: Sequence[int], start: int, end: int) -> Iterator[Rectangle]:
    """Yield the rectangles that cover elements [start, end) of a contiguous tensor, in the order of memory.

    They are at most 2 n - 1 for a tensor of n dimensions.
    Example: [2, 10) of shape (4, 3) is ((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1)).
    """
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # rows [first, last) are whole
    if first > last:
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], index: int, start: int, end: int) -> Iterator[Rectangle]:
    """Yield the rectangles of elements [start, end), which are all in row `index`."""
    before = index * math.prod(shape[1:])
    if start < end:
        for offset, size in rectangles(shape[1:], start - before, end - before):
            yield (index, *offset), (1, *size)


def state_pieces(optimizer: Any, model: dict[str, Any]) -> list[ShardedTensor]:
    """Return the states of a rank's distributed optimizer (megatron's, or several of them chained) as pieces.

    model: the sharded tensors of the model's parameters, whose `data` are the parameters themselves. A
    piece's `data` is a view of the optimizer's state, so loading a piece changes the optimizer.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model)
    entries = {entry.data: entry for entry in nested_values(sharded)}
    return [
        piece
        for part in optimizer.chained_optimizers
        for states in (_states(part),)
        for parameter, start, end in _ranges(part)
        for block, first in _blocks(entries[parameter])
        for piece in _cut(block, states[parameter], start, end, first)
    ]


def _states(optimizer: Any) -> dict[torch.nn.Parameter, dict[str, torch.Tensor]]:
    """Return {parameter: its STATES}. megatron's own function (0.16.1) returns those of another parameter if
    some are float32 and some bfloat16."""
    models = (*optimizer.model_fp32_groups, *optimizer.model_float16_groups)
    masters = (*optimizer.shard_fp32_groups, *optimizer.shard_fp32_from_float16_groups)
    return {
        parameter: {"param": master, **optimizer.optimizer.state[master]}
        for of_model, of_master in zip(models, masters, strict=True)
        for parameter, master in zip(of_model, of_master, strict=True)
    }


def _ranges(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Yield (parameter, start, end): the optimizer has the states of these elements of the parameter."""
    buckets = (bucket for buffer in optimizer.gbuf_ranges for of in buffer.values() for bucket in of)
    for parameter, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
        yield parameter, ranges["param"].start, ranges["param"].end


def _blocks(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the tensors of the file that a parameter belongs to, and the element at which each one begins.

    A parameter can belong to two: gate and up projection of a layer are one parameter.
    """
    whole = torch.empty(entry.data.shape, device="meta", dtype=entry.data.dtype)
    entry = replace(entry, data=whole)
    built = list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]
    assert sum(block.data.numel() for block in built) == whole.numel(), entry.key
    for block in built:
        is_view = block.data.untyped_storage()._cdata == whole.untyped_storage()._cdata
        assert is_view and block.data.is_contiguous(), entry.key
        yield block, block.data.storage_offset()


def _cut(
    block: ShardedTensor, states: Mapping[str, torch.Tensor], start: int, end: int, first: int
) -> Iterator[ShardedTensor]:
    """Yield the pieces of a block that begins at element `first` of a parameter.

    states: [end - start] each, of elements [start, end) of the parameter.
    """
    here, there = max(start, first), min(end, first + block.data.numel())
    position = here - start
    for offset, size in rectangles(block.local_shape, here - first, there - first):
        length = math.prod(size)
        # The file may have one dimension more: the number of the layer or of the expert.
        leading = block.prepend_axis_num
        at = [*block.global_offset[:leading]]
        at += [a + b for a, b in zip(block.global_offset[leading:], offset, strict=True)]
        shape = (*(1 for _ in range(leading)), *size)
        for name in STATES:
            data = states[name].detach()[position : position + length].view(shape)
            yield ShardedTensor(
                key=f"optimizer.state.{name}.{block.key}",
                data=data,
                dtype=data.dtype,
                local_shape=shape,
                global_shape=block.global_shape,
                global_offset=tuple(at),
                axis_fragmentations=None,  # not a grid
                replica_id=(*block.replica_id[:2], 0),  # every data-parallel rank has other elements
                allow_shape_mismatch=block.allow_shape_mismatch,
            )
        position += length


def check_coverage(plan: Metadata) -> None:
    """Raise ValueError unless the chunks of every tensor in a checkpoint's plan have as many elements as it.

    torch's own check also compares each chunk with most others, which takes 47 s for a tensor of 24,000
    chunks (the experts of 94 layers), while all ranks wait.
    """
    for name, tensor in plan.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            planned = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if planned != math.prod(tensor.size):
                raise ValueError(f"{name} of size {tuple(tensor.size)}: its chunks have {planned} elements")
