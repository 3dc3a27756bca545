"""Compare the tensors of a Hugging Face folder with its config.json. The tensors themselves are not read.

Otherwise a tensor that is larger than config.json says would be cut, and a tensor that nothing reads, such as
a bias or the scales of quantised weights, would be ignored. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_files import INDEX, SINGLE, entries, in_files, same_bytes
from megatron_stppo.weights.sharding.hf_names import EMBEDDING, HEAD, ModelShape, hf_shapes
from megatron_stppo.weights.sharding.tiles import Entry

TYPES = ("BF16", "F16", "F32", "F64")
# transformers computes these buffers again, and ignores those of old checkpoints
BUFFERS = re.compile(r"rotary_emb\.inv_freq")
# the value head of a critic, and the heads of reward models, which a critic replaces by its own
OTHER_HEADS = re.compile(r"(score|v_head|classifier)\..*")


def check_weights(field: str, folder: Path, shape: ModelShape, critic: bool = False) -> None:
    """Raise ConfigError unless the folder has exactly the tensors of a model of this shape.

    critic: whether the model's head is not read. A folder without weights passes: `plan` needs none, and
    loading them reports the absence.
    """
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        return
    where, wanted = f"{field}={folder}", hf_shapes(shape, "none" if critic else "vocabulary")
    given = {
        key: entry
        for key, entry in entries(folder, shape).items()
        if not BUFFERS.search(key) and not key.startswith(shape.left_out)
    }
    if critic:
        given = {key: entry for key, entry in given.items() if key != HEAD and not OTHER_HEADS.match(key)}
    elif shape.tied and HEAD in given and EMBEDDING in given:
        _check_tied(where, given[HEAD], given[EMBEDDING])
        del given[HEAD]
    _check_types(where, given)
    if absent := sorted(wanted.keys() - given.keys()):
        raise ConfigError(
            f"{where}: has no tensor {absent[0]!r} ({len(absent)} of {len(wanted)} are missing); the "
            "checkpoint is not complete, or its config.json is of another model"
        )
    for key, size in wanted.items():
        if given[key].shape != size:
            raise ConfigError(
                f"{where}: tensor {key!r} has shape {[*given[key].shape]}, its config.json gives {[*size]}; "
                "correct config.json"
            )
    if unread := sorted(given.keys() - wanted.keys()):
        raise ConfigError(
            f"{where}: tensor {unread[0]!r} ({len(unread)} in all) does not belong to a model of its "
            "config.json and would be ignored; correct config.json, or remove it"
        )


def _check_types(where: str, given: Mapping[str, Entry]) -> None:
    for key, entry in given.items():
        if entry.dtype not in TYPES:
            raise ConfigError(
                f"{where}: tensor {key!r} has type {entry.dtype}, and quantised weights are not supported; "
                "use the model's folder in bfloat16, or dequantise it"
            )


def left_out(folder: Path, shape: ModelShape) -> str:
    """Return a line that says which tensors of the folder are not read, or "" if all are."""
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        return ""
    names = [entry.key for entry in in_files(folder)]
    counts = {prefix: sum(name.startswith(prefix) for name in names) for prefix in shape.left_out}
    found = [f"{count} tensors {prefix}*" for prefix, count in counts.items() if count]
    return f"model.path={folder}: left out are {' and '.join(found)}; only text is trained" if found else ""


def _check_tied(where: str, head: Entry, embedding: Entry) -> None:
    """Check that a head beside tied embeddings is a copy of them; transformers does not tie other heads."""
    if not same_bytes(head, embedding):
        raise ConfigError(
            f"{where}: tie_word_embeddings=true, but {HEAD!r} differs from {EMBEDDING!r}; set "
            "tie_word_embeddings=false in config.json"
        )
