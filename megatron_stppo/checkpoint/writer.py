"""Writes one checkpoint on all ranks. It uses its own process group, so it can run in any thread.

Rank 0 creates the folder. Every rank writes its file. Rank 0 adds the metadata, the state of the training
loop and the manifest, and publishes the step. After each of these stages the ranks exchange their results, so
that no rank waits for one that failed.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_stppo.base.printing import say
from megatron_stppo.checkpoint import step_folder as steps
from megatron_stppo.checkpoint.host_copy import HostCopy, Written
from megatron_stppo.checkpoint.step_folder import File, Manifest
from megatron_stppo.parallel.collectives import decode, encode, gather_bytes, raise_together


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
