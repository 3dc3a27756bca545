"""Cuts the models of a configuration to their first layers, so that the checks take minutes on few GPUs.

A cut model is a folder with its own config.json and links to everything else. Its safetensors files have
tensors of layers that it does not have. Our loader reads only those of config.json, and vLLM reads none,
because the weights come from the reshard. An adapter's file is written again: all its tensors are read.
"""

from __future__ import annotations

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
    model, lora, root = config.model, config.model.lora, config.run.folder
    folders = {
        name: _at(root, given, layers, _write_model, wait)
        for name in ("path", "critic_path", "reference_path")
        if (given := getattr(model, name)) is not None and read_shape(given).layers > layers
    }
    if lora.path is not None and "path" in folders:
        lora = lora.model_copy(update={"path": _at(root, lora.path, layers, _write_adapter, wait)})
    cut: dict[str, Any] = {"model": model.model_copy(update=folders | {"lora": lora})}
    if "path" in folders:  # such a model seldom ends a turn
        r, e = config.rollout, config.environment
        turn, turns = min(r.max_turn_tokens, TURN_TOKENS), min(e.max_turns, TURNS)
        cut["rollout"] = r.model_copy(update={"max_turn_tokens": turn})
        cut["environment"] = e.model_copy(update={"max_turns": turns})
    return config.model_copy(update=cut)


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
    given: dict[str, Any] = json.loads((source / SETTINGS).read_text(encoding="utf-8"))
    whole = given["num_hidden_layers"]
    cut = {name: value[:layers] for name, value in given.items() if _is_per_layer(value, whole)}
    settings = given | cut | {"num_hidden_layers": layers}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    _link_others(source, folder, SETTINGS)


def _is_per_layer(value: Any, layers: int) -> bool:
    texts = isinstance(value, list) and all(isinstance(one, str) for one in value)  # not token ids
    return texts and len(value) == layers


def _write_adapter(source: Path, folder: Path, layers: int) -> None:
    """Leave out the matrices of other layers, and the hash of the model that the adapter belongs to."""
    with safe_open(source / TENSORS, framework="pt") as file:
        kept = {key: file.get_tensor(key) for key in file.keys() if _layer_of(key) < layers}
    save_file(kept, folder / TENSORS, metadata={"format": "pt"})
    _link_others(source, folder, TENSORS)


def _layer_of(key: str) -> int:
    found = LAYER.search(key)
    return int(found[1]) if found else 0


def _link_others(source: Path, folder: Path, written: str) -> None:
    for path in source.iterdir():
        if path.name != written:
            (folder / path.name).symlink_to(path)
