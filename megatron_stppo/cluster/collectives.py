"""The collectives that this rank has issued and that have not ended, from torch's flight recorder.

A collective of GPUs runs on the device, and the thread that issued it may be anywhere. So the stack of a
thread does not show which collective a rank waits for. The recorder does: it keeps the last 2,000 collectives
of each backend (TORCH_FR_BUFFER_SIZE; 0 turns it off). It has none that do not go through torch, such as
those of vLLM's own NCCL communicator.

Reading it can take long or never end: torch queries the GPU for the state of each collective, and meanwhile
other threads of Python do not run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

RECORDS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, which a CPU build lacks, and of others
SHOWN = 3  # collectives of a backend
COALESCED = "nccl:coalesced"


def unfinished() -> str:
    """Return the oldest collectives that have not ended.

    Example: "nccl:all_reduce 812 of TENSOR_MODEL_PARALLEL_GROUP". It says so if there are none, and if a
    record cannot be read.
    """
    module = sys.modules.get("torch._C._distributed_c10d")  # None before torch is imported
    found: list[str] = []
    for name in RECORDS:
        if hasattr(module, name):
            try:
                record = json.loads(getattr(module, name)())
                found += names(record.get("entries", []))  # without the key if there are none
            except (LookupError, TypeError, ValueError) as error:  # torch has changed
                found.append(f"{name[1:]} cannot be read ({type(error).__name__}: {error})")
    return ", ".join(found) or "none is recorded"


def names(entries: Iterable[dict[str, Any]]) -> list[str]:
    """Return "operation number of group" of the oldest entries that have not ended, at most SHOWN.

    The number of a collective is equal on all ranks of its group. Sends and receives have numbers of their
    own, which each rank counts.
    """
    listed = list(entries)
    # The state of an operation in a batch is recorded for the batch alone.
    batches = {_place(entry) for entry in listed if entry["profiling_name"] == COALESCED}
    left = [
        entry
        for entry in listed
        if not entry["retired"]
        and entry["state"] != "completed"
        and (entry["profiling_name"] == COALESCED or _place(entry) not in batches)
    ]
    left.sort(key=lambda entry: entry["time_created_ns"])
    return [_name(entry) for entry in left[:SHOWN]]


def _place(entry: dict[str, Any]) -> tuple[str, bool, int]:
    """Return (group, whether it is a send or a receive, number)."""
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    return entry["process_group"][0], entry["is_p2p"], number


def _name(entry: dict[str, Any]) -> str:
    group, description = entry["process_group"]
    shown = f"group {group}" if description in ("", "undefined") else description
    return f"{entry['profiling_name']} {_place(entry)[2]} of {shown}"
