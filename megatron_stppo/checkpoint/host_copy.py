"""One rank's share of a model's checkpoint, which is copied to the host and written while training continues.

megatron plans the save, and the files have megatron's format (torch_dist). megatron's own writer is not used:
it forks processes for every save, which is unsafe in a rank with a GPU, an engine and threads, and it waits
forever if one of them dies. Here the calling thread writes one file per rank and hashes the bytes that it
writes.
"""

import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_stppo.checkpoint.contents import check_coverage
from megatron_stppo.checkpoint.step_folder import File
from megatron_stppo.parallel.collectives import raise_together


@dataclass(frozen=True)
class Written:
    """The location of a piece of a tensor: bytes [offset, offset + length) of `file`."""

    tensor: str
    at: tuple[int, ...] | None  # index of the piece's first element in the whole tensor
    index: int | None
    file: str
    offset: int
    length: int


class HostCopy:
    """One rank's share of one model's checkpoint. The constructor is collective.

    keep=True copies the tensors to the host, so that training may change them before they are written.
    keep=False makes no copy; the tensors must not change until they are written.
    """

    def __init__(self, tensors: dict[str, Any], folder: Path, keep: bool) -> None:
        # Without megatron's check of the shards: every rank would collect the description of all of them.
        sharded, common = save_preprocess(tensors, validate_access_integrity=False)
        renamed, *_ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        self._folder = folder
        self._writer = _HostWriter(folder, keep)
        planner = _Planner(dedup_replicated_tensors=False, flatten_state_dict=False)
        (_, metadata, _), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(renamed, False), self._writer, None, 0, planner
        )
        raise_together(
            planner.problem, lambda failures: RuntimeError(f"a save cannot be planned: {failures[0]}"), str
        )
        self._metadata: Metadata | None = metadata  # for the shares of all ranks; on rank 0 only
        if metadata is not None:  # megatron adds all plans, which would become a part of the file
            vars(metadata).pop("all_local_plans", None)
        buffer = io.BytesIO()
        torch.save(common, buffer)  # noqa: TID251  megatron's format, read with weights_only
        self._common = buffer.getvalue()

    @property
    def bytes(self) -> int:
        """Approximate number of bytes that this rank will write."""
        return sum(len(d) if isinstance(d, bytes) else d.nbytes for _, d in self._writer.items)

    def write(self) -> tuple[list[Written], dict[str, File]]:
        """Write this rank's file, if it has one, and wait until it is on disk.

        Return the pieces written, and {file name: hash and size}. Raises OSError.
        """
        items, name = self._writer.items, self._writer.name
        if not items:
            return [], {}
        written = []
        with (self._folder / name).open("wb") as file:
            stream = _Hashed(file)
            for item, data in items:
                start = stream.bytes
                stream.put(data)
                at = tuple(item.index.offset) if item.index.offset is not None else None
                place = (name, start, stream.bytes - start)
                written.append(Written(item.index.fqn, at, item.index.index, *place))
            file.flush()
            os.fsync(file.fileno())
        return written, {name: File(stream.hash.hexdigest(), stream.bytes)}

    def finish(self, written: Sequence[Written]) -> list[str]:
        """Write the files that describe the checkpoint, from the pieces of all ranks. Rank 0 only.

        Return the names of the files written, which may not be on disk yet.
        """
        assert self._metadata is not None, "only rank 0 holds the whole plan"
        results = [
            WriteResult(
                MetadataIndex(w.tensor, None if w.at is None else torch.Size(w.at), w.index),
                w.length,
                _StorageInfo(w.file, w.offset, w.length),
            )
            for w in written
        ]
        self._writer.finish(self._metadata, [results])
        (self._folder / COMMON_STATE_FNAME).write_bytes(self._common)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
        return [p.name for p in self._folder.iterdir() if not p.name.endswith(DEFAULT_SUFFIX)]


class _Planner(MCoreSavePlanner):
    """megatron's planner, with a check of the plan that is fast for many chunks.

    megatron plans for all ranks on rank 0 alone, so what is wrong is kept in `problem`.
    """

    problem: str | None = None

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        try:
            check_coverage(self.metadata)
        except ValueError as error:
            self.problem = str(error)
        return self.global_plan, self.metadata


class _HostWriter(FileSystemWriterAsync):
    """Keeps the items that megatron plans for this rank in `items`, without writing them."""

    def __init__(self, folder: Path, keep: bool) -> None:
        super().__init__(folder, thread_count=1)
        self._keep = keep
        self.items: list[tuple[WriteItem, Tensor | bytes]] = []
        self.name = ""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # megatron's method would create the folder

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, Tensor):
                self.items.append((item, data.detach().to("cpu", copy=True) if self._keep else data.detach()))
            else:
                self.items.append((item, data.getvalue()))


class _Hashed:
    """Writes to a file and hashes the bytes written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.hash, self.bytes = file, hashlib.sha256(), 0
        self._refused: OSError | None = None

    def put(self, data: Tensor | bytes) -> None:
        """Write a tensor or bytes. Raises OSError."""
        if isinstance(data, bytes):
            self.write(data)
        else:
            data = data.cpu()
            if data.untyped_storage().nbytes() != data.nbytes:  # torch.save writes a view's whole storage
                data = data.clone()
            torch.save(data, cast(IO[bytes], self))  # noqa: TID251  the same; torch only writes and flushes
        if self._refused is not None:
            raise self._refused

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:  # torch would report a full disk as an unexpected position in the file
            self._refused = error
        self.hash.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None: ...
