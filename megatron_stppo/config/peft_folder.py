"""Reads an adapter's folder in the format of the package `peft`, without torch and without its numbers.

adapter_config.json has the rank, alpha and options, and the header of adapter_model.safetensors the names,
types and shapes of the matrices. Options that change what an adapter computes, and options that are not known
here, are refused unless they are off.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.config.model import LINEAR, LoraConfig

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the name of every tensor
DIGEST = "base_sha256"  # in the metadata of adapter_model.safetensors, where peft has "format" alone
MAX_SETTINGS, MAX_HEADER = 1 << 20, 1 << 24  # bytes
MAX_NUMBER, MAX_SHOWN = 1e9, 120  # largest r and lora_alpha; characters of a name or value in a message
MAX_NAME = 200  # characters of a tensor's name; those of the supported models have less than 100
TYPES = ("BF16", "F16", "F32")
MATRIX = re.compile(re.escape(PREFIX) + r"(?P<layer>[\w.]+)\.lora_(?P<matrix>[AB])\.weight")
REMEDY = "merge the adapter into its model with peft (merge_and_unload), and give that folder as model.path"
AGAIN = "write the adapter again"
NOT_SAFETENSORS = f"{TENSORS} is not a safetensors file; {AGAIN}"

# Options that may have any value: they describe the adapter, or act only while peft trains it.
ANY = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",  # of use_qalora
    "r",
    "revision",
    "target_modules",  # the tensors say which layers have an adapter
}
# Options with more values than null, false, 0 and empty ones that leave W + alpha / r * B A as it is. Other
# initial values of A and B, such as "pissa", also change W.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
}


@dataclass(frozen=True)
class PeftFolder:
    """An adapter's folder, without the numbers of its matrices."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # Hugging Face names, in the order of LINEAR
    shapes: dict[str, tuple[int, ...]]  # by checkpoint name, without PREFIX
    base: str  # name or folder of the model that it belongs to; "" if that is not recorded
    recorded: dict[str, str]  # the metadata: DIGEST, and those of data/text/tokenizer_files.py; not of peft


def read_folder(folder: Path) -> PeftFolder:
    """Return what a folder says about its adapter. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"model.lora.path={folder}: no such folder; give one with {SETTINGS} and {TENSORS}")
    try:
        return _read(folder)
    except ConfigError as error:
        raise ConfigError(f"model.lora.path={folder}: {error}") from None


def completed(lora: LoraConfig) -> LoraConfig:
    """Return the section with the rank, alpha and targets of its `path` where they are not given.

    A section that has all of them is returned as it is: the saved configuration of a run can be read without
    the folder. Raises ConfigError if the folder is needed and cannot be read.
    """
    missing = {"rank", "alpha", "targets"} - lora.model_fields_set
    if lora.path is None or not missing:
        return lora
    folder = read_folder(lora.path)
    return lora.changed(**{name: getattr(folder, name) for name in missing})


def _read(folder: Path) -> PeftFolder:
    """Return what the folder says. Raises ConfigError without the name of the folder, as all that follows."""
    settings = _settings(folder / SETTINGS)
    _check_options(settings)
    rank, alpha = _number(settings, "r"), _number(settings, "lora_alpha")
    if rank % 1:
        raise ConfigError(f"{SETTINGS} has r={rank}, not a whole number; {AGAIN}")
    base = settings.get("base_model_name_or_path")
    header = _header(folder)
    metadata = header.pop("__metadata__", None)
    texts = {k: v for k, v in metadata.items() if isinstance(v, str)} if isinstance(metadata, dict) else {}
    shapes = _matrices(header)
    having = {key.split(".")[-3] for key in shapes}
    targets = tuple(name for name in LINEAR if name in having)
    return PeftFolder(int(rank), alpha, targets, shapes, base if isinstance(base, str) else "", texts)


def _settings(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SETTINGS + 1)
        settings = json.loads(text) if len(text) <= MAX_SETTINGS else None
    except OSError as error:
        raise ConfigError(f"{SETTINGS} cannot be read ({error.strerror}); {AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{SETTINGS} is not JSON ({error}); {AGAIN}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{SETTINGS} is not an object of at most 1 MiB; {AGAIN}")
    return settings


def _check_options(settings: dict[str, Any]) -> None:
    for name in ("peft_type", "r", "lora_alpha"):
        if settings.get(name) in (None, ""):
            raise ConfigError(f"{SETTINGS} has no {name}; give an adapter that the package peft has written")
    for name, value in sorted(settings.items()):
        if name not in ANY and value and value not in ALLOWED.get(name, ()):
            option = f"{_short(name if name.isidentifier() else repr(name))}={_short(json.dumps(value))}"
            raise ConfigError(f"{SETTINGS} has {option}, which is not supported; {REMEDY}")


def _header(folder: Path) -> dict[str, Any]:
    """Return {name: {"dtype": .., "shape": ..}} of adapter_model.safetensors, with its `__metadata__`."""
    try:
        with (folder / TENSORS).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size) if size <= MAX_HEADER else b"")
    except FileNotFoundError:
        pickled = sorted(file.name for file in folder.glob("adapter_model*.bin"))
        besides = f"{pickled[0]} is not read, because a pickle can run code; " if pickled else ""
        raise ConfigError(
            f"there is no {TENSORS}; {besides}save the adapter with safe_serialization=True"
        ) from None
    except OSError as error:
        raise ConfigError(f"{TENSORS} cannot be read ({error.strerror}); {AGAIN}") from None
    except (ValueError, RecursionError):
        raise ConfigError(NOT_SAFETENSORS) from None
    if not isinstance(header, dict):
        raise ConfigError(NOT_SAFETENSORS)
    return header


def _matrices(header: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in sorted(header.items()):
        tensor = f"tensor {_short(name)!r}"
        if len(name) > MAX_NAME:
            raise ConfigError(f"{tensor} has a name of {len(name)} characters; {REMEDY}")
        match = MATRIX.fullmatch(name)
        layer = match["layer"].rpartition(".")[2] if match else ""
        if layer not in LINEAR or ".experts." in name:
            known = f"{', '.join(LINEAR[:-1])} or {LINEAR[-1]}"
            raise ConfigError(f"{tensor} does not belong to an adapter of {known} outside experts; {REMEDY}")
        try:
            dtype, shape = str(entry["dtype"]), tuple(min(int(n), 1 << 63) for n in entry["shape"])
        except (TypeError, KeyError, ValueError, OverflowError):
            raise ConfigError(NOT_SAFETENSORS) from None
        if dtype not in TYPES:
            raise ConfigError(f"{tensor} has type {_short(dtype)}; save it as one of {', '.join(TYPES)}")
        if len(shape) != 2:
            raise ConfigError(f"{tensor} has {len(shape)} dimensions, not 2; {REMEDY}")
        shapes[name.removeprefix(PREFIX)] = shape
    if not shapes:
        raise ConfigError(f"{TENSORS} holds no tensor; {AGAIN}")
    return shapes


def _number(settings: dict[str, Any], name: str) -> float:
    value = settings[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
        option = f"{name}={_short(json.dumps(value))}"
        raise ConfigError(f"{SETTINGS} has {option}, not a number above 0; {AGAIN}")
    return float(value)


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}.."
