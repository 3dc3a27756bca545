"""Dumps of scored batches (dumps/iteration-00012/), for inspection and for `replay`.

batch.json contains the reasons for the dump, and the pipeline layout if the batch has routes.
stage-K.safetensors contains the batch's tensors and group_N, the task that each trajectory belongs to. There
is one stage file, except under routing replay: then every pipeline stage writes the routes of its own layers.
"""

import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from megatron_stppo.base.files import replace_folder
from megatron_stppo.base.types import Batch, ScoredBatch
from megatron_stppo.config import ConfigError
from megatron_stppo.data.exchange import undivided
from megatron_stppo.data.validity import columns
from megatron_stppo.parallel.collectives import any_rank
from megatron_stppo.parallel.groups import MeshRank

log = logging.getLogger(__name__)
FOLDER, RECORD, GROUP = "dumps", "batch.json", "group_N"
ADDED = {"advantage_T", "return_T", "return_R"}  # by `estimate`, which computes them again
DUMP = re.compile(r"^iteration-(\d+)$")


def write(
    run: Path,
    iteration: int,
    batch: Batch,
    group_N: Tensor,
    mesh: MeshRank,
    reasons: Sequence[str],
    keep: int,
) -> None:
    """Write a scored batch with the tokens of all ranks. Collective.

    All but the newest `keep` dumps up to this iteration are deleted.

    The folder is renamed into place when it is complete. It replaces a dump of an interrupted attempt. An
    error of the disk is logged as a warning only, because the run does not need the dump.
    """
    final = run / FOLDER / f"iteration-{iteration:05d}"
    scratch = final.with_suffix(".tmp")
    routed = _stages(mesh) if batch.routes_P is not None else None
    first = mesh.tensor_rank == mesh.context_rank == mesh.data_rank == 0  # of its pipeline stage
    failed = False
    if mesh.data_size > 1:
        batch = undivided(batch, mesh.tensor_and_token_group)
    if mesh.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    dist.barrier()
    try:
        if first and (routed or mesh.pipeline_rank == 0):
            scratch.mkdir(parents=True, exist_ok=True)
            _file(scratch, mesh.pipeline_rank).write_bytes(save(_tensors(batch, group_N)))
        if mesh.rank == 0:
            record = {"iteration": iteration, "reasons": list(reasons), "routed": routed}
            (scratch / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    except OSError as error:
        log.warning("%s: not dumped: %s", final, error)
        failed = True
    if any_rank(failed):
        if mesh.rank == 0:  # the next dump has another name, and the disk may be full
            shutil.rmtree(scratch, ignore_errors=True)
        return
    if mesh.rank != 0:
        return
    try:
        replace_folder(scratch, final)
        # dumps of later iterations are from an earlier attempt; a user may still inspect them
        for older in [n for n in recorded(run) if n <= iteration][:-keep]:
            shutil.rmtree(run / FOLDER / f"iteration-{older:05d}")
    except OSError as error:
        log.warning("%s: %s", final, error)


def read(run: Path, iteration: int, mesh: MeshRank) -> tuple[ScoredBatch, Tensor]:
    """Return (batch, group_N) as they were written, without the advantages, and not divided.

    Raises ConfigError if the dump is damaged, or if its routes belong to another pipeline layout.
    """
    folder = run / FOLDER / f"iteration-{iteration:05d}"
    try:
        routed = json.loads((folder / RECORD).read_text(encoding="utf-8"))["routed"]
        if routed not in (None, _stages(mesh)):
            raise ConfigError(f"{folder}: holds the routes of other pipeline stages; set {routed}")
        tensors = load(_file(folder, mesh.pipeline_rank if routed else 0).read_bytes())
        group_N = tensors.pop(GROUP)
        tensors["held_N"] = tensors["sequence_offsets"][:-1]
        scored = {name: column for name, column in tensors.items() if name not in ADDED}
        return ScoredBatch(**scored, epochs=()), group_N
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{folder}: cannot be read ({error}); choose another run or iteration") from None


def recorded(run: Path) -> list[int]:
    """Return the iterations that have a dump, in ascending order."""
    matches = (DUMP.match(path.name) for path in (run / FOLDER).glob("iteration-*"))
    return sorted(int(match[1]) for match in matches if match)


def _tensors(batch: Batch, group_N: Tensor) -> dict[str, Tensor]:
    tensors = columns(batch) | {GROUP: group_N}
    del tensors["held_N"]  # a dump holds all tokens
    return {name: value.contiguous() for name, value in tensors.items()}


def _file(folder: Path, stage: int) -> Path:
    return folder / f"stage-{stage}.safetensors"


def _stages(mesh: MeshRank) -> str:
    """Return the configuration fields that determine which layers each pipeline rank has."""
    names = ("pipeline", "virtual", "first_stage_layers", "last_stage_layers")
    fields = ((name, getattr(mesh.layout, name)) for name in names)
    return ", ".join(f"parallel.{name}={value}" for name, value in fields if value is not None)
