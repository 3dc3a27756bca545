"""Cuts the models of a configuration to their first layers, so that the checks take minutes on few GPUs.

A cut model is a folder with its own config.json and links to everything else. Its safetensors files have
tensors of layers that it does not have. Our loader reads only those of config.json, and vLLM reads none,
because the weights come from the reshard. An adapter's file is written again: all its tensors are read.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.peft_folder import TENSORS
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.validation.model_layout import check_stages
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape

LEAST = 4  # layers, where the model has as many
TURN_TOKENS, TURNS = 64, 3  # of an episode of a cut model, at most
SETTINGS, COMPLETE = "config.json", ".complete"
WAIT = 300.0  # seconds for the first rank to write the folders
LAYER = re.compile(r"\.layers\.(\d+)\.")


def reduced(config: Config, layers: int | None = None, wait: float = WAIT) -> Config:
    """Return the configuration with models of `layers` layers; None: default_layers; 0: all layers.

    The first rank writes the folders into run.folder, before there are process groups; the others wait until
    they are complete. Raises ConfigError if the pipeline cannot be divided so, or after `wait` seconds.
    """
    if layers == 0:
        return config
    shape, layout = read_shape(config.model.path), Layout.of_world(process.world_size(), config.parallel)
    layers = default_layers(shape, layout) if layers is None else min(layers, shape.layers)
    check_stages(replace(shape, layers=layers), layout)
    adapter, root = config.model.lora.path, config.run.folder
    model: dict[str, Any] = {
        name: _at(root, folder, layers, _write_model, wait)
        for name in ("path", "critic_path", "reference_path")
        if (folder := getattr(config.model, name)) is not None and read_shape(folder).layers > layers
    }
    if "path" not in model:
        return config.changed(model=model)
    if adapter is not None:
        model["lora"] = {"path": _at(root, adapter, layers, _write_adapter, wait)}
    turn = min(config.rollout.max_turn_tokens, TURN_TOKENS)  # such a model seldom ends one
    turns = min(config.environment.max_turns, TURNS)
    return config.changed(model=model, rollout={"max_turn_tokens": turn}, environment={"max_turns": turns})


def default_layers(shape: ModelShape, layout: Layout) -> int:
    """Return the smallest number of layers, from LEAST to the model's own, that the pipeline can have."""
    for layers in range(min(LEAST, shape.layers), shape.layers):
        try:
            check_stages(replace(shape, layers=layers), layout)
        except ConfigError:
            continue
        return layers
    return shape.layers


def _at(root: Path, source: Path, layers: int, write: Callable[[Path, Path, int], None], wait: float) -> Path:
    """Return the folder of a cut model or adapter, complete.

    Its name has a hash of the source, so that a folder that an earlier call left is not used for another.
    """
    source = source.resolve()
    digest = hashlib.sha256(str(source).encode())
    for path in sorted(source.iterdir()):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    folder = root / f"{layers}-layers-{digest.hexdigest()[:16]}"
    done = folder / COMPLETE
    if process.rank() == 0 and not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write(source, folder, layers)
        done.touch()
    limit = time.monotonic() + wait
    while not done.exists():
        if time.monotonic() > limit:
            raise ConfigError(
                f"run.root={root.parent}: {folder} was not written in {wait:.0f} s; name a folder that all "
                "nodes share"
            )
        time.sleep(0.1)
    return folder


def _write_model(source: Path, folder: Path, layers: int) -> None:
    settings: dict[str, Any] = json.loads((source / SETTINGS).read_text(encoding="utf-8"))
    every = settings["num_hidden_layers"]
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == every and all(isinstance(x, str) for x in value):
            settings[name] = value[:layers]  # an entry for each layer: lists of numbers are token ids
    settings["num_hidden_layers"] = layers
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    _link_others(source, folder, SETTINGS)


def _write_adapter(source: Path, folder: Path, layers: int) -> None:
    """Leave out the matrices of other layers, and the hash of the model that the adapter belongs to."""
    with safe_open(source / TENSORS, framework="pt") as file:
        of = {key: LAYER.search(key) for key in file.keys()}
        kept = {k: file.get_tensor(k) for k, layer in of.items() if layer is None or int(layer[1]) < layers}
    save_file(kept, folder / TENSORS, metadata={"format": "pt"})
    _link_others(source, folder, TENSORS)


def _link_others(source: Path, folder: Path, written: str) -> None:
    for path in source.iterdir():
        if path.name != written:
            (folder / path.name).symlink_to(path)
