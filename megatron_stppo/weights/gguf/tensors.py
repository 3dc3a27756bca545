"""The tensors of a GGUF file under the names of a Hugging Face checkpoint, decoded one at a time."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import torch
from gguf import ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from megatron_stppo.weights.gguf.header import Header
from megatron_stppo.weights.sharding.hf_names import EMBEDDING, HEAD, NORM, ModelShape

WHOLE = {"token_embd": EMBEDDING, "output": HEAD, "output_norm": NORM}
OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
PROJECTIONS = ("gate", "up", "down")
NAME = re.compile(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?\.(weight|bias)")
FREQUENCIES = "rope_freqs.weight"  # header.py reads it


class Origin(NamedTuple):
    """Where a tensor of the checkpoint is in the file."""

    tensor: ReaderTensor
    expert: int | None = None  # its place in a tensor that holds all experts of a layer
    heads: int | None = None  # its rows are those of llama.cpp's rotary embeddings: see _rotary_halves


def sources(header: Header, shape: ModelShape) -> dict[str, Origin]:
    """Return {name in the checkpoint: its source}. Raises ConfigError for a tensor without a name there, or
    of a type that gguf cannot decode."""
    found: dict[str, Origin] = {}
    for name, tensor in header.tensors.items():
        if name == FREQUENCIES:
            continue
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError:
            raise header.refusal(
                f"{name} has the type {tensor.tensor_type.name}, which cannot be decoded"
            ) from None
        stem, _, kind = name.rpartition(".")
        if stem in WHOLE and kind == "weight":
            found[WHOLE[stem]] = Origin(tensor)
            continue
        match = NAME.fullmatch(name)
        if match is None:
            raise header.refusal(f"tensor {name!r} is not known")
        found |= _of_layer(header, shape, int(match[1]), match[2], match[3], match[4], tensor)
    return found


def _of_layer(
    header: Header,
    shape: ModelShape,
    layer: int,
    part: str,
    expert: str | None,
    kind: str,
    tensor: ReaderTensor,
) -> dict[str, Origin]:
    prefix = f"model.layers.{layer}."
    if part in OF_LAYER and expert is None:
        rotary = {"attn_q": shape.heads, "attn_k": shape.kv_heads} if shape.gguf_pairs else {}
        return {f"{prefix}{OF_LAYER[part]}.{kind}": Origin(tensor, heads=rotary.get(part))}
    _, _, of_mlp = shape.prefixes(layer)
    mlp = shape.mlp
    if part == "ffn_gate_inp" and shape.experts:
        return {mlp.router_weight(of_mlp): Origin(tensor)}
    which = part.removeprefix("ffn_").removesuffix("_exps")
    if which not in PROJECTIONS or kind != "weight":
        raise header.refusal(f"tensor 'blk.{layer}.{part}' is not known")
    place = PROJECTIONS.index(which)
    if not part.endswith("_exps"):
        return {mlp.projections(f"{of_mlp}experts.{expert}." if expert else of_mlp)[place]: Origin(tensor)}
    return {mlp.projections(f"{of_mlp}experts.{e}.")[place]: Origin(tensor, e) for e in range(shape.experts)}


def decode(source: Origin, dtype: torch.dtype) -> Tensor:
    """Return the tensor in the checkpoint's form."""
    data = source.tensor.data if source.expert is None else source.tensor.data[source.expert]
    value = torch.from_numpy(np.array(dequantize(data, source.tensor.tensor_type), dtype=np.float32))
    if source.heads is not None:
        value = _rotary_halves(value, source.heads)
    return value.to(dtype).contiguous()


def _rotary_halves(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of a projection in the order of transformers, which rotates the first half of a head
    with the second. llama.cpp rotates neighbours: its rows of a head of 4 are 0, 2, 1, 3."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
