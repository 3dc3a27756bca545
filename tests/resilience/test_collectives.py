"""resilience/collectives.py. tests/resilience/test_deadlines.py has a real recorder, that of gloo."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_stppo.resilience import collectives

MODULE = "torch._C._distributed_c10d"


def entry(name: str, number: int, created: int, **changed: Any) -> dict[str, Any]:
    """Return an entry with the keys of torch 2.13's record that are used."""
    own = {"profiling_name": name, "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False}
    own |= {"process_group": ("3", "TENSOR"), "state": "started", "retired": False}
    return own | {"time_created_ns": created} | changed


def recorder(entries: list[dict[str, Any]]) -> Callable[[], bytes]:
    return lambda: json.dumps({"version": "2.10", "entries": entries}).encode()


def test_the_oldest_unfinished_collectives_of_all_backends_are_named_and_nccls_record_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = [entry("nccl:all_gather", 1, 1, retired=True), entry("nccl:all_gather", 2, 2, state="completed")]
    pair = {"is_p2p": True, "p2p_seq_id": 5, "process_group": ("7", "")}
    late = [entry("nccl:send", 0, 9, **pair), entry("nccl:all_reduce", 812, 3)]
    gloo = [entry("gloo:barrier", 4, 5, process_group=("0", "default_pg"))]
    fake = SimpleNamespace(_dump_nccl_trace_json=recorder(done + late), _dump_fr_trace_json=recorder(gloo))
    fake._dump_nccl_trace = lambda includeStackTraces: b"with stacks" if includeStackTraces else b"pickled"
    monkeypatch.setitem(sys.modules, MODULE, fake)
    assert collectives.unfinished(tmp_path / "collectives", 3) == (
        "nccl:all_reduce 812 of TENSOR, gloo:barrier 4 of default_pg, nccl:send 5 of 7"
    )
    assert (tmp_path / "collectives" / "nccl_trace_rank_3").read_bytes() == b"pickled"
    monkeypatch.setattr(fake, "_dump_nccl_trace_json", recorder(done))
    monkeypatch.delattr(fake, "_dump_fr_trace_json")
    assert collectives.unfinished(tmp_path / "collectives", 3) == ""


def test_a_recorder_that_fails_or_does_not_answer_is_logged_and_does_not_end_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed = SimpleNamespace(_dump_fr_trace_json=lambda: b'{"events": []}')
    monkeypatch.setitem(sys.modules, MODULE, changed)
    assert collectives.unfinished(tmp_path, 0) == ""
    monkeypatch.setattr(collectives, "LIMIT", 0.1)
    monkeypatch.setattr(changed, "_dump_fr_trace_json", lambda: time.sleep(1))
    assert collectives.unfinished(tmp_path, 0) == ""
    why = ["KeyError: 'entries'", "it did not answer in 0.1 s"]
    assert caplog.messages == [f"torch's flight recorder cannot be read: {text}" for text in why]
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert collectives.unfinished(tmp_path, 0) == "", "torch is not imported yet"
    assert len(caplog.messages) == 2
