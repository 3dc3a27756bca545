"""The commands `convert`, and exports of a model as a Hugging Face folder and of adapters as one of `peft`.

weights/sharding/hf_checkpoint.py reads a Hugging Face folder (load_hf). The reshard moves the weights: its
target is the whole tensors on rank 0, for one file at a time.
"""

import functools
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megatron_stppo.base.files import make_scratch, scratch_of
from megatron_stppo.checkpoint import loading as checkpoints
from megatron_stppo.checkpoint.saving import Saver
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.model import LoraConfig
from megatron_stppo.config.peft_folder import DIGEST, PREFIX, SETTINGS, TENSORS
from megatron_stppo.data.text.tokenizer_files import digests
from megatron_stppo.model import build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.parallel.collectives import refused_together
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.weights.reshard.resharder import Resharder
from megatron_stppo.weights.sharding.hf_checkpoint import weights_digest
from megatron_stppo.weights.sharding.hf_names import Head, ModelShape, hf_shapes, read_shape, text_fields
from megatron_stppo.weights.sharding.hf_write import (
    FILE_BYTES,
    as_stored,
    by_file,
    finish,
    publish,
    type_of,
    write_tensors,
)
from megatron_stppo.weights.sharding.low_rank import Term, adapter_shapes
from megatron_stppo.weights.sharding.spans import training_layouts, whole_spans, widths_of
from megatron_stppo.weights.sharding.tiles import Spans

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
TEMPLATES = "additional_chat_templates"  # a folder of the tokenizer: the templates that have names


def export_hf(
    folder: Path,
    parameters: Mapping[str, Tensor],
    layouts: Mapping[int, Spans],
    shape: ModelShape,
    template: Path,
    terms: Mapping[tuple[str, str], Term] | None = None,
    *,
    head: Head = "vocabulary",
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the `parameters` of all ranks, with the terms of their adapters, to `folder`. Collective.

    config.json and the tokenizer come from `template`; the weights keep the parameters' types, and
    config.json names the model's. That of a model with images becomes that of its text model. head: that of
    the parameters and layouts; a folder with a value head is a token classification model with one label for
    transformers. Rank 0 holds at most `file_bytes` (or the largest tensor) at once. The folder is renamed
    into place when it is complete. Raises ConfigError on all ranks if it exists or cannot be written, and
    ReshardError if rows were lost in the transfer.
    """
    folder, partial = Path(folder), scratch_of(Path(folder))
    dtype = next(iter(parameters.values())).dtype
    on_first(lambda: _begin(folder, Path(template), shape, dtype, head))
    shapes = hf_shapes(shape, head)
    files = by_file(shape, shapes, dtype, file_bytes)
    for name, keys in files.items():
        whole = gather(parameters, layouts, shape, shapes, keys, terms)
        held = as_stored(shape, whole)
        on_first(functools.partial(write_tensors, held, partial / name, partial / "config.json"))
    on_first(lambda: finish(folder, partial, shape, files, shapes, dtype))


def gather(
    parameters: Mapping[str, Tensor],
    layouts: Mapping[int, Spans],
    shape: ModelShape,
    shapes: Mapping[str, Sequence[int]],
    keys: Collection[str],
    terms: Mapping[tuple[str, str], Term] | None = None,
) -> dict[str, Tensor]:
    """Return {hf_key: whole tensor} of `keys` in host memory on rank 0, and {} on other ranks. Collective.

    shapes: {hf_key: shape} of all tensors of the layouts. terms: as for Resharder. The tensors have the
    parameters' types. They are assembled on the parameters' device, which must have memory for all of `keys`.
    """
    some = next(iter(parameters.values()))
    mine = keys if dist.get_rank() == 0 else ()
    whole = {
        key: torch.empty(*shapes[key], dtype=type_of(shape, key, some.dtype), device=some.device)
        for key in mine
    }
    targets, widths = {0: whole_spans(shape, {key: shapes[key] for key in keys})}, widths_of(shape, shapes)
    Resharder(parameters, whole, layouts, targets, widths, terms).sync(0)
    return {key: tensor.cpu() for key, tensor in whole.items()}


def _begin(folder: Path, template: Path, shape: ModelShape, dtype: torch.dtype, head: Head) -> None:
    partial = make_scratch("output", folder)
    for path in sorted(template.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS):
            shutil.copyfile(path, partial / path.name)
    if (template / TEMPLATES).is_dir():
        shutil.copytree(template / TEMPLATES, partial / TEMPLATES, copy_function=shutil.copyfile)
    config = text_fields(template, json.loads((partial / "config.json").read_text(encoding="utf-8")))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    if head == "value":
        named = shape.architecture.replace("CausalLM", "TokenClassification")
        config |= {"architectures": [named], "num_labels": 1}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def on_first(write: Callable[[], None]) -> None:
    """Run `write` on rank 0. Raises ConfigError on all ranks if it fails."""
    with refused_together():
        try:
            if dist.get_rank() == 0:
                write()
        except (OSError, ValueError, SafetensorError) as error:  # the last one on a full disk
            raise ConfigError(str(error)) from error


def export_peft(
    folder: Path, parameters: Mapping[str, Tensor], shape: ModelShape, config: Config, mesh: MeshRank
) -> str:
    """Write the adapters of all ranks in the format of the package `peft`, and return their size as text.

    adapter_model.safetensors holds every A and B; its metadata have hashes of the weights that they belong to
    and of the tokenizer. parameters: named_parameters of this rank. Collective. The folder is renamed into
    place when it is complete. Raises ConfigError on all ranks if it exists or cannot be written.
    Example of the size: "8 tensors, 0.1 M parameters".
    """
    lora = config.model.lora
    layouts = {rank: build.adapters_of_rank(shape, config, mesh.layout, rank) for rank in range(mesh.world)}
    shapes = adapter_shapes(shape, lora.rank, lora.names)
    whole = gather(parameters, layouts, shape, shapes, shapes)
    settings = adapter_config(lora, config.model.path, whole)
    recorded = {DIGEST: weights_digest(config.model.path, shape)} | digests(config.model.path)

    def write() -> None:
        partial = make_scratch("output", Path(folder))
        (partial / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        named = {PREFIX + key: tensor for key, tensor in whole.items()}
        write_tensors(named, partial / TENSORS, partial / SETTINGS, recorded)
        publish(partial, Path(folder))

    on_first(write)
    return f"{len(shapes)} tensors, {sum(a * b for a, b in shapes.values()) / 1e6:,.1f} M parameters"


def adapter_config(lora: LoraConfig, base: Path, keys: Collection[str]) -> dict[str, Any]:
    """Return the contents of adapter_config.json. keys: the checkpoint names of every A and B.

    Example: of rank 16, alpha 32 and q_proj, it has r 16, lora_alpha 32 and target_modules ["q_proj"].
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "target_modules": sorted({key.split(".")[-3] for key in keys}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def to_hf(config: Config, checkpoint: str, output: Path) -> None:
    """Write the actor of a run's checkpoint ("step_N" or "latest") as a Hugging Face folder, and print one
    line that says what was written. Collective. Raises ConfigError and CheckpointError."""
    config = config.of_checkpoint()
    mesh, shape, weights, step = _actor(config, checkpoint)
    layouts = training_layouts(shape, mesh.layout, spec=layer_spec(config))
    terms = build.adapter_terms(weights, shape, config, mesh, merged=True)
    export_hf(output, weights, layouts, shape, config.model.path, terms)
    if mesh.rank == 0:
        size = _size(shape, process.dtype(config))
        print(f"wrote {output}: {size}; actor of {step}, tokenizer of {config.model.path}")
    process.stop()


def to_peft(config: Config, checkpoint: str, output: Path) -> None:
    """Write the adapters of such an actor to the new folder `output`, and print one line that says what was
    written. Collective. Raises ConfigError and CheckpointError."""
    config = config.of_checkpoint()
    mesh, shape, weights, step = _actor(config, checkpoint)
    size = export_peft(output, weights, shape, config, mesh)
    if mesh.rank == 0:
        print(f"wrote {output}: {size}; adapters of {step}")
    process.stop()


def _actor(config: Config, checkpoint: str) -> tuple[MeshRank, ModelShape, Mapping[str, Tensor], Path]:
    """Join the process groups, load the actor of a checkpoint, and return its parameters and its folder.

    Collective. With adapters, a checkpoint holds only these, and the other weights are those of model.path.
    """
    mesh, shape = process.start(config), read_shape(config.model.path)
    load = build.from_hf if config.model.lora.rank else build.build
    model = load("actor", shape, config, mesh, process.dtype(config))
    folder = config.run.folder / "checkpoints"
    state = checkpoints.load_weights(folder, "actor", model, checkpoints.step_of(checkpoint))
    return mesh, shape, build.named_parameters(model), folder / f"step_{state['iteration']}"


def _size(shape: ModelShape, dtype: torch.dtype) -> str:
    """Return the size as text. Example: "0.9 M parameters, float32, 3.6 MB"."""
    count = sum(torch.Size(dims).numel() for dims in hf_shapes(shape).values())
    name = str(dtype).removeprefix("torch.")
    return f"{count / 1e6:,.1f} M parameters, {name}, {count * dtype.itemsize / 1e6:,.1f} MB"


def to_megatron(config: Config, output: Path) -> None:
    """Write model.path as step_0 of a new checkpoints folder, with new optimizers, for a run to resume from.
    Print one line that says what was written. Collective.
    """
    mesh, shape = process.start(config), read_shape(config.model.path)
    roles: tuple[build.Role, ...] = ("actor", "critic") if config.needs_critic else ("actor",)
    trainers: dict[str, Trainer] = {
        role: build.trainer(role, shape, config, mesh, process.dtype(config)) for role in roles
    }
    saver = Saver(output, config, mesh.layout)
    saver.save(0, trainers, {"iteration": 0})
    saver.finish()
    if mesh.rank == 0:
        print(f"wrote {output / 'step_0'}: {' and '.join(roles)} of {config.model.path}, new optimizers")
    process.stop()
