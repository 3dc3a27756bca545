from __future__ import annotations

import json
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_stppo.cluster import deadlines
from megatron_stppo.cluster.deadlines import Beat, is_reader, oldest, place, read, unfinished, verdict

MODULE = "torch._C._distributed_c10d"
PAIR = {"is_p2p": True, "process_group": ("7", "undefined")}
START = """
import ctypes, threading, time
from pathlib import Path
from megatron_stppo.cluster import deadlines
deadlines.BEAT, deadlines.SILENT, deadlines.GRACE, deadlines.END = 0.05, 0.1, 0.5, 0.5
limits = {"start_up": 9, "score": 0.8, "rollout": 9, "other": 9}
"""


def run(body: str, folder: Path) -> tuple[int, str, float]:
    """Return (exit code, stderr, seconds) of a process with short deadlines."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", f"{START}\nfolder = Path({str(folder)!r})\n{body}"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done.returncode, done.stderr, time.monotonic() - started


def beat(
    number: int, entered: int = 4, phase: str = "score", at: str = "a.py:1 f", waits: bool = True
) -> Beat:
    return Beat(number, entered, phase, at, waits)


def walk(rank: int, world: int, folder: Path, deadline: float) -> None:
    """Run steps with the others in phase score, until a deadline ends it. Output goes to folder/stderr-N."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from megatron_stppo.cluster.launch import process

    with (folder / f"stderr-{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)
    deadlines.BEAT, deadlines.SILENT = 0.2, 0.8
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=2))
    process.log_to(folder, rank)
    limits = {"start_up": 60.0, "score": deadline, "other": 60.0}
    with deadlines.Watchdog(folder, limits, rank, world) as watchdog:
        while True:
            with watchdog.phase("score"):
                dist.all_reduce(torch.ones(8))
                time.sleep(0.01)


def test_a_stopped_rank_is_named_with_its_phase_and_the_others_end(tmp_path: Path) -> None:
    """Three real processes use gloo; the second gets SIGSTOP."""
    context, deadline = mp.get_context("spawn"), 2.0
    ranks = [context.Process(target=walk, args=(r, 3, tmp_path, deadline)) for r in range(3)]
    for process in ranks:
        process.start()
    try:
        paths = [tmp_path / "heartbeats" / f"rank-{rank}.json" for rank in range(3)]
        until = time.monotonic() + 200
        while not all((b := read(path)) and b.entered > 20 for path in paths):
            assert time.monotonic() < until and all(process.is_alive() for process in ranks)
            time.sleep(0.05)
        assert ranks[1].pid is not None
        os.kill(ranks[1].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        for rank in (0, 2):
            ranks[rank].join(30)
        assert time.monotonic() - stopped < deadline + 10
        assert [process.exitcode for process in ranks] == [1, None, 1]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    for rank in (0, 2):
        told = (tmp_path / f"stderr-{rank}").read_text()
        start = f"rank {rank}: phase score exceeded its deadline of 2 s (deadlines.score)"
        assert f"megatron-stppo: {start}: rank 1 has been silent since phase " in told
        assert "; rank 2: score, " in told
        left = rf"rank {rank}: collectives that have not ended: gloo:all_reduce [1-9]\d* of default_pg\n"
        assert re.search(left, told)
        logged = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert start in logged and re.search(left, logged)
        assert "thread MainThread:" in logged and "in all_reduce" in logged


def test_a_single_rank_past_its_deadline_prints_its_stacks_and_ends(tmp_path: Path) -> None:
    body = 'with deadlines.Watchdog(folder, limits, 0, 1) as watch, watch.phase("score"): time.sleep(9)'
    code, told, seconds = run(body, tmp_path)
    assert code == 1 and seconds < 5
    assert "rank 0: phase score exceeded its deadline of 0.8 s (deadlines.score)" in told
    assert "thread MainThread:" in told


def test_a_thread_that_never_releases_the_gil_is_ended_by_the_timer(tmp_path: Path) -> None:
    """PyDLL holds the GIL during its call, so that no Python thread runs."""
    body = (
        'with deadlines.Watchdog(folder, limits, 0, 1) as watch, watch.phase("score"):\n'
        "    ctypes.PyDLL(None).sleep(15)"
    )
    code, told, seconds = run(body, tmp_path)
    assert code == 1 and seconds < 8
    assert "Timeout" in told and "<module>" in told


def test_a_phase_is_timed_from_its_own_start_and_its_time_is_not_charged_to_the_outer_phase(
    tmp_path: Path,
) -> None:
    body = (
        "with deadlines.Watchdog(folder, limits, 0, 1) as watch:\n"
        "    for _ in range(3):\n"
        '        with watch.phase("rollout"), watch.phase("score"): time.sleep(0.3)\n'
        "    time.sleep(0.9)\n"
        "time.sleep(1.4)\n"
    )
    code, told, _ = run(body, tmp_path)
    assert (code, told) == (0, "")


def test_a_run_that_raised_ends_even_if_one_of_its_threads_does_not(tmp_path: Path) -> None:
    body = (
        "threading.Thread(target=time.sleep, args=(15,)).start()\n"
        "with deadlines.Watchdog(folder, limits, 0, 1): raise ValueError('out of blocks')\n"
    )
    code, told, seconds = run(body, tmp_path)
    assert code == 1 and seconds < 8
    assert "ValueError: out of blocks" in told


def test_a_run_that_raised_keeps_its_exit_code_while_it_waits_for_a_checkpoint(tmp_path: Path) -> None:
    body = (
        "import atexit, sys\n"
        "deadlines.END = 9\n"
        "atexit.register(time.sleep, 1.5)\n"
        "try:\n"
        "    with deadlines.Watchdog(folder, limits, 0, 1): raise ValueError('too many are not finite')\n"
        "except ValueError: sys.exit(93)\n"
    )
    assert run(body, tmp_path)[:2] == (93, "")


def test_a_full_disk_does_not_end_the_heartbeats(tmp_path: Path) -> None:
    """A folder at the path of the temporary file makes the writes fail."""
    body = (
        "blocked = folder / 'heartbeats' / 'rank-0.json.tmp'\n"
        "blocked.mkdir(parents=True)\n"
        "with deadlines.Watchdog(folder, limits, 0, 1):\n"
        "    time.sleep(0.3)\n"
        "    blocked.rmdir()\n"
        "    until = time.monotonic() + 8\n"
        "    while deadlines.read(folder / 'heartbeats' / 'rank-0.json') is None:\n"
        "        assert time.monotonic() < until\n"
        "        time.sleep(0.05)\n"
    )
    assert run(body, tmp_path)[:2] == (0, "")


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (
            [beat(9), beat(2)],
            "rank 1 has been silent since phase score. rank 0: score, a.py:1 f; rank 1: score,",
        ),
        ([beat(9), None], "rank 1 never wrote a heartbeat. rank 0: score, a.py:1 f"),
        ([beat(9), beat(9, 3, "advantage")], "rank 1 is still in phase advantage. "),
        (
            [beat(9), beat(9, at="b.py:7 g", waits=False)],
            "rank 1 is in b.py:7 g and is not seen to wait as others are. ",
        ),
        (
            [beat(9), beat(9)],
            "no rank is seen to be later than the others: compare what they say of their collectives. ",
        ),
        (
            [beat(9, waits=False), beat(9, waits=False)],
            "no rank is seen to be later than the others: compare what they say of their collectives. ",
        ),
    ],
)
def test_the_rank_that_others_wait_for_is_named(after: list[Beat | None], said: str) -> None:
    before = [beat(2), beat(2) if after[1] else None]
    assert verdict(before, after).startswith(said)


def test_of_many_ranks_some_read_all_heartbeats() -> None:
    for world, count in ((1, 1), (4, 4), (64, 64), (100, 50), (1024, 64)):
        assert sum(is_reader(rank, world) for rank in range(world)) == count


def test_the_reported_place_is_the_innermost_frame_of_the_package() -> None:
    at, waits = place(sys._getframe())
    assert at.startswith("cluster/test_deadlines.py:") and at.endswith(sys._getframe().f_code.co_name)
    assert not waits


@pytest.mark.parametrize("file", ["torch/cuda/streams.py", "torch/distributed/distributed_c10d.py"])
def test_a_thread_waits_in_a_collective_and_for_its_gpu(file: str) -> None:
    seen: list[tuple[str, bool]] = []
    source = compile("see()", f"/packages/{file}", "exec")
    exec(source, {"see": lambda: seen.append(place(sys._getframe()))})
    assert [waits for _, waits in seen] == [True]


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
    assert unfinished() == (
        "nccl:all_reduce 812 of TENSOR, nccl:send 0->1 5 of group 7, gloo:barrier 4 of default_pg"
    )
    monkeypatch.setattr(fake, "_dump_nccl_trace_json", recorder(done))
    monkeypatch.setattr(fake, "_dump_fr_trace_json", recorder([]))
    assert unfinished() == "none is recorded"


def test_operations_of_a_batch_have_the_state_of_the_batch() -> None:
    """NCCL records no end of a single send or receive in a batch, as pipeline parallelism sends them."""
    pair = [entry("nccl:send 0->1", 5, 1, **PAIR), entry("nccl:recv 0<-1", 5, 2, **PAIR)]
    ended = entry("nccl:coalesced", 5, 3, state="completed", retired=True, **PAIR)
    waits = [entry("nccl:send 0->1", 6, 4, **PAIR), entry("nccl:coalesced", 6, 5, state="started", **PAIR)]
    other_group = entry("nccl:send 0->1", 5, 6, is_p2p=True, process_group=("8", "X"))
    assert oldest([*pair, ended, *waits]) == ["nccl:coalesced 6 of group 7"]
    assert oldest([*pair, ended, other_group]) == ["nccl:send 0->1 5 of X"]


def test_a_record_in_another_format_is_said_and_the_other_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gloo = [entry("gloo:barrier", 4, 5, process_group=("0", "default_pg"))]
    fake = SimpleNamespace(_dump_fr_trace_json=recorder(gloo))
    fake._dump_nccl_trace_json = lambda: b'{"entries": [{"retired": 0}]}'
    monkeypatch.setitem(sys.modules, MODULE, fake)
    assert unfinished() == (
        "dump_nccl_trace_json cannot be read (KeyError: 'profiling_name'), gloo:barrier 4 of default_pg"
    )


def test_torchs_own_record_is_read_when_it_is_empty_and_before_torch_is_imported() -> None:
    code = (
        "from megatron_stppo.cluster.deadlines import unfinished\n"
        "print(unfinished())\n"
        "import torch.distributed\n"
        "print(unfinished())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "none is recorded\n" * 2
