"""cluster/collectives.py. tests/cluster/test_deadlines.py has a real recorder, that of gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_stppo.cluster import collectives

MODULE = "torch._C._distributed_c10d"
PAIR = {"is_p2p": True, "process_group": ("7", "undefined")}


def entry(name: str, number: int, created: int, **changed: Any) -> dict[str, Any]:
    """Return an entry with the keys of torch 2.13's record that are used."""
    numbers = {"collective_seq_id": 0, "p2p_seq_id": 0}
    numbers["p2p_seq_id" if changed.get("is_p2p") else "collective_seq_id"] = number
    own = {"profiling_name": name, "is_p2p": False, "process_group": ("3", "TENSOR")} | numbers
    return own | {"state": "scheduled", "retired": False, "time_created_ns": created} | changed


def recorder(entries: list[dict[str, Any]]) -> Callable[[], bytes]:
    """Return a function with the format of torch: without entries there is no such key."""
    record = {"version": "2.10"} | ({"entries": entries} if entries else {})
    return lambda: json.dumps(record).encode()


def test_the_oldest_unfinished_collectives_of_all_backends_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    done = [entry("nccl:all_gather", 1, 1, retired=True), entry("nccl:all_gather", 2, 2, state="completed")]
    late = [entry("nccl:send 0->1", 5, 9, **PAIR), entry("nccl:all_reduce", 812, 3, state="started")]
    gloo = [entry("gloo:barrier", 4, 5, process_group=("0", "default_pg"))]
    fake = SimpleNamespace(_dump_nccl_trace_json=recorder(done + late), _dump_fr_trace_json=recorder(gloo))
    monkeypatch.setitem(sys.modules, MODULE, fake)
    assert collectives.unfinished() == (
        "nccl:all_reduce 812 of TENSOR, nccl:send 0->1 5 of group 7, gloo:barrier 4 of default_pg"
    )
    monkeypatch.setattr(fake, "_dump_nccl_trace_json", recorder(done))
    monkeypatch.setattr(fake, "_dump_fr_trace_json", recorder([]))
    assert collectives.unfinished() == "none is recorded"


def test_operations_of_a_batch_have_the_state_of_the_batch() -> None:
    """NCCL records no end of a single send or receive in a batch, as pipeline parallelism sends them."""
    pair = [entry("nccl:send 0->1", 5, 1, **PAIR), entry("nccl:recv 0<-1", 5, 2, **PAIR)]
    ended = entry("nccl:coalesced", 5, 3, state="completed", retired=True, **PAIR)
    waits = [entry("nccl:send 0->1", 6, 4, **PAIR), entry("nccl:coalesced", 6, 5, state="started", **PAIR)]
    other_group = entry("nccl:send 0->1", 5, 6, is_p2p=True, process_group=("8", "X"))
    assert collectives.names([*pair, ended, *waits]) == ["nccl:coalesced 6 of group 7"]
    assert collectives.names([*pair, ended, other_group]) == ["nccl:send 0->1 5 of X"]


def test_a_record_in_another_format_is_said_and_the_other_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gloo = [entry("gloo:barrier", 4, 5, process_group=("0", "default_pg"))]
    fake = SimpleNamespace(_dump_fr_trace_json=recorder(gloo))
    fake._dump_nccl_trace_json = lambda: b'{"entries": [{"retired": 0}]}'
    monkeypatch.setitem(sys.modules, MODULE, fake)
    assert collectives.unfinished() == (
        "dump_nccl_trace_json cannot be read (KeyError: 'profiling_name'), gloo:barrier 4 of default_pg"
    )


def test_torchs_own_record_is_read_when_it_is_empty_and_before_torch_is_imported() -> None:
    code = (
        "from megatron_stppo.cluster.collectives import unfinished\n"
        "print(unfinished())\n"
        "import torch.distributed\n"
        "print(unfinished())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "none is recorded\n" * 2
