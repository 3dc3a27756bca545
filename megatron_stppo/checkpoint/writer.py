"""Writes one checkpoint on all ranks. It uses its own process group, so it can run in any thread.

Rank 0 creates the folder. Every rank writes its file. Rank 0 adds the metadata, the state of the training
loop and the manifest, and publishes the step. After each of these stages the ranks exchange their results, so
that no rank waits for one that failed.

megatron plans the save, and the files have megatron's format (torch_dist). megatron's own writer is not used:
it forks processes for every save, which is unsafe in a rank with a GPU, an engine and threads, and it waits
forever if one of them dies. Here the calling thread writes one file per rank and hashes the bytes that it
writes, from a copy on the host, while training continues.
"""

import errno
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
import torch.distributed as dist
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

from megatron_stppo.base.printing import say
from megatron_stppo.checkpoint import step_folder as steps
from megatron_stppo.checkpoint.contents import check_coverage
from megatron_stppo.checkpoint.step_folder import File, Manifest
from megatron_stppo.parallel.collectives import decode, encode, gather_bytes, raise_together


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


@dataclass(frozen=True)
class Report:
    """The result of a stage on one rank: the pieces and the files that it wrote."""

    pieces: dict[str, list[Written]] = field(default_factory=dict)  # by role
    files: dict[str, File] = field(default_factory=dict)  # by path relative to the step's folder


@dataclass(frozen=True)
class Failure:
    """The error of a stage on one rank."""

    text: str
    refused: bool  # whether it is an error of the file system


class Refused(RuntimeError):
    """Raised on every rank if a file system operation failed on any rank."""


@dataclass
class Save:
    """One checkpoint to write: what it contains, where it goes, and the result of run()."""

    scratch: Path
    final: Path
    copies: dict[str, HostCopy]  # by role
    files: dict[str, bytes]  # of the first rank, by name: the state of the training loop, as JSON, and others
    manifest: Manifest  # `files` is empty
    bytes: int  # approximate total that all ranks will write
    retire: Callable[[], None]  # removes steps that are not kept after this one
    group: dist.ProcessGroup
    refused: str = ""  # the result, on every rank: the error of the file system
    broken: BaseException | None = None  # the result: any other error

    def run(self) -> None:
        """Write and publish the checkpoint. Collective.

        Errors are stored in `refused` and `broken`, not raised: an exception in a thread would be lost.
        """
        try:
            self._together(self._prepare if self._first else Report)
            reports = self._together(self._own)
            self._together(partial(self._publish, reports) if self._first else Report)
        except Refused as error:
            self.refused = f"{self.final} is not saved ({self.bytes / 2**20:.1f} MiB): {error}"
            if self._first:
                shutil.rmtree(self.scratch, ignore_errors=True)
                say(f"WARNING: {self.refused}; training continues, the next checkpoint will be tried")
        except BaseException as error:
            self.broken = error
        finally:
            self.copies, self.files = {}, {}  # host memory

    @property
    def _first(self) -> bool:
        return dist.get_rank() == 0

    def _together(self, action: Callable[[], Report | None]) -> list[Report]:
        """Run `action` and return the reports of all ranks on rank 0 (an empty list on the others).

        Raises Refused or RuntimeError on every rank if the action failed on any rank.
        """
        report, failure, cause = Report(), None, None
        try:
            report = action() or report
        except OSError as error:
            failure = Failure(f"{error.strerror or error} (rank {dist.get_rank()})", refused=True)
        except Exception as error:
            text = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
            failure, cause = Failure(text, refused=False), error
        raise_together(failure, _combined, Failure, self.group, cause=cause)
        return [decode(payload, Report) for payload in gather_bytes(encode(report), self.group)]

    def _prepare(self) -> None:
        """Remove the folders of interrupted saves and create the new one.

        Raises OSError, in particular if there is too little free space: a save must not fill the disk,
        because the run writes other files too.
        """
        folder = self.final.parent
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("step_*.tmp-*"):
            shutil.rmtree(left, ignore_errors=True)
        room = shutil.disk_usage(folder).free
        if room < self.bytes:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {room / 2**20:.1f} MiB are free")
        for role in self.copies:
            (self.scratch / role).mkdir(parents=True)

    def _own(self) -> Report:
        pieces: dict[str, list[Written]] = {}
        files: dict[str, File] = {}
        for role, copy in self.copies.items():
            pieces[role], written = copy.write()
            files |= {f"{role}/{name}": file for name, file in written.items()}
        return Report(pieces, files)

    def _publish(self, reports: Iterable[Report]) -> None:
        files = {name: file for report in reports for name, file in report.files.items()}
        for role, copy in self.copies.items():
            for name in copy.finish([piece for report in reports for piece in report.pieces[role]]):
                steps.flush(self.scratch / role / name)
                files[f"{role}/{name}"] = steps.describe(self.scratch / role / name)
        for name, content in self.files.items():
            steps.write_durably(self.scratch / name, content)
            files[name] = steps.describe(self.scratch / name)
        steps.publish(self.scratch, self.final, replace(self.manifest, files=files))
        say(f"saved {self.final}")
        try:
            self.retire()
        except OSError as error:  # the step is published; only disk space is lost
            say(f"WARNING: older checkpoints could not be removed: {error}")


def _combined(failures: dict[int, Failure]) -> RuntimeError:
    """Return the first failure that is not of the file system, or else the first of all."""
    broken = next((failure for failure in failures.values() if not failure.refused), None)
    return Refused(next(iter(failures.values())).text) if broken is None else RuntimeError(broken.text)
