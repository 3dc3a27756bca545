"""The collectives that this rank has issued and that have not ended, from torch's flight recorder.

A collective of GPUs runs on the device, and the thread that issued it may wait anywhere for its result. So
the stack of a thread does not show that it waits for other ranks. The recorder does: it keeps the last 2,000
collectives of each backend (TORCH_FR_BUFFER_SIZE; 0 turns it off).
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
NCCL, OTHERS = "_dump_nccl_trace", "_dump_fr_trace"  # torch has the first one only if it was built with NCCL
JSON = "_json"  # their names in the other format
PREFIX = "nccl_trace_rank_"  # of the files, for torch's program torchfrtrace
LIMIT = 3.0  # seconds that reading may take: a GPU that no longer works may block it
SHOWN = 3  # collectives


def unfinished(folder: Path, rank: int) -> str:
    """Return the oldest collectives that have not ended, and write NCCL's record to `folder`.

    Returns "" if there are none, and also if the recorder cannot be read, which is logged.
    Example: "nccl:all_reduce 812 of TENSOR_MODEL_PARALLEL_GROUP, gloo:barrier 4 of default_pg".
    """
    found: list[str] = []
    failed = [f"it did not answer in {LIMIT:g} s"]

    def look() -> None:
        try:
            found.append(", ".join(names(_entries(folder / f"{PREFIX}{rank}"))))
        except Exception as error:  # of a private function of torch: the report must not end with it
            failed[0] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=look, name="flight recorder", daemon=True)
    thread.start()
    thread.join(LIMIT)
    if not found:
        log.error("torch's flight recorder cannot be read: %s", failed[0])
    return found[0] if found else ""


def _entries(file: Path) -> list[dict[str, Any]]:
    module = sys.modules.get("torch._C._distributed_c10d")  # None before torch is imported
    found: list[dict[str, Any]] = []
    for name in (NCCL, OTHERS):
        if dump := getattr(module, name + JSON, None):
            found += json.loads(dump())["entries"]
    if dump := getattr(module, NCCL, None):
        with contextlib.suppress(OSError):  # the disk is full
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(dump(includeStackTraces=False))  # a trial with them, on gloo, took 17 s
    return found


def names(entries: Iterable[dict[str, Any]]) -> list[str]:
    """Return "operation number of group" of the oldest entries that have not ended, at most SHOWN.

    The number is that of the collective in its group, equal on all ranks of the group.
    """
    left = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    left.sort(key=lambda entry: entry["time_created_ns"])
    return [_name(entry) for entry in left[:SHOWN]]


def _name(entry: dict[str, Any]) -> str:
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    group, description = entry["process_group"]
    return f"{entry['profiling_name']} {number} of {description or group}"
