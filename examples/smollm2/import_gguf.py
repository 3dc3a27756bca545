"""Write a GGUF file of llama.cpp as a Hugging Face folder, which model.path accepts.

    python examples/smollm2/import_gguf.py FILE FOLDER [--dtype bfloat16]

The weights of one file of the new folder are in memory at once.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf import ReaderTensor
from gguf.quants import dequantize
from gguf_header import Header, write_tokenizer
from rich.progress import track
from torch import Tensor

from megatron_stppo.base.errors import Ending
from megatron_stppo.base.files import scratch_folder
from megatron_stppo.base.printing import say
from megatron_stppo.weights.sharding.hf_names import EMBEDDING, HEAD, NORM, ModelShape, hf_shapes, read_shape
from megatron_stppo.weights.sharding.hf_write import by_file, finish, write_tensors

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
FREQUENCIES = "rope_freqs.weight"  # gguf_header.py reads it
Shown = Callable[[Sequence[str]], Iterable[str]]  # what the names of the tensors pass through, a progress bar


class Origin(NamedTuple):
    """Where a tensor of the checkpoint is in the file."""

    tensor: ReaderTensor
    expert: int | None = None  # its place in a tensor that holds all experts of a layer
    heads: int | None = None  # its rows are those of llama.cpp's rotary embeddings: see _rotary_halves


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="a GGUF file of llama.cpp")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new folder to write")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="type of the weights"
    )
    arguments = parser.parse_args(argv)
    folder, dtype = arguments.folder, arguments.dtype
    try:
        shape = import_gguf(
            arguments.file, folder, getattr(torch, dtype), lambda names: track(names, "decoding")
        )
    except Ending as error:
        say(str(error))
        return error.exit_code
    say(f"wrote {folder}: {shape.family}, {shape.layers} layers, {shape.vocab} tokens, {dtype}")
    return 0


def import_gguf(file: Path, folder: Path, dtype: torch.dtype, shown: Shown = list) -> ModelShape:
    """Write config.json, tokenizer, chat template, end tokens and weights of `file` to a new `folder`.

    The folder is renamed into place when it is complete. Returns the model's shape.
    Raises ConfigError for a file that is damaged or not supported, before any weight is decoded.
    """
    with scratch_folder("FOLDER", folder) as partial:
        header = Header(file)
        fields = header.config() | {"dtype": str(dtype).removeprefix("torch.")}
        (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        shape = read_shape(partial)
        origins = _matched(header, shape)
        write_tokenizer(header, partial)
        ids = {
            f"{name}_token_id": header.values.get(f"tokenizer.ggml.{name}_token_id")
            for name in ("bos", "eos")
        }
        # a turn's end, if another
        turn = header.values.get("tokenizer.ggml.eot_token_id", ids["eos_token_id"])
        if turn != ids["eos_token_id"]:
            ids["eos_token_id"] = [ids["eos_token_id"], turn]
        (partial / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
        shapes = hf_shapes(shape)
        files = by_file(shape, shapes, dtype)
        for name, keys in files.items():
            tensors = {key: decode(origins[key], dtype) for key in shown(keys)}
            write_tensors(tensors, partial / name, partial / "config.json")
        finish(folder, partial, shape, files, shapes, dtype)
    return shape


def _matched(header: Header, shape: ModelShape) -> dict[str, Origin]:
    """Return the sources of exactly the tensors of a model of this shape."""
    origins, expected = sources(header, shape), hf_shapes(shape)
    for name in sorted(origins.keys() ^ expected.keys()):
        raise header.refusal(f"has {'a' if name in origins else 'no'} tensor {name}, unlike its metadata")
    for name, (tensor, expert, _) in origins.items():
        held = tuple(reversed(tensor.shape.tolist()))[expert is not None :]
        if held != expected[name]:
            raise header.refusal(
                f"tensor {tensor.name} has the shape {list(held)}, not {list(expected[name])}"
            )
    return origins


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
        rotary = {"attn_q": shape.heads, "attn_k": shape.kv_heads} if header.architecture == "llama" else {}
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


if __name__ == "__main__":
    sys.exit(main())
