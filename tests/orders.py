"""Records the collectives of every process of a run on CPUs, and finds what would hang NCCL but not gloo.

A GPU runs NCCL's collectives as they are enqueued, whatever their communicator: one thread of a rank must
enqueue all of them, and all ranks in one order. Gloo runs each as soon as its ranks have come. Processes with
the variable FOLDER (tests/ranks.py, tests/preloaded.py) write what they call; `findings` reads it. On a GPU,
groups have NCCL unless they ask for gloo, and parallel/collectives.py uses gloo. An engine's ranks add up
over NCCL there, here over shared memory in groups for which vLLM asks for gloo: its methods are recorded.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_stppo.plan.meter import tensors_in

FOLDER = "STPPO_ORDERS"  # an environment variable
EQUAL = ("allgather", "_allgather_base", "all_gather_single", "allreduce", "broadcast", "reduce", "barrier")
EQUAL += ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single")  # shapes are those of all ranks
UNEQUAL = ("alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "allreduce_coalesced")
UNEQUAL += ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
PAIR = ("send", "recv")
OF_VLLM = {"all_reduce": "allreduce", "all_gather": "_allgather_base", "gather": "gather"}
MAIN = "main"


class Event(NamedTuple):
    """What a rank called. Example: Event("w/2", 2, 0, "allreduce", "torch.float32 (4,)", MAIN, True, 0)."""

    group: str  # with its world: several programs have groups of one name
    size: int
    rank: int  # in the group
    kind: str
    what: str  # types and shapes; of send and recv the other rank
    thread: str  # MAIN also if the main thread waits for it
    on_gpu: bool  # where there is one
    batch: int = 0  # of calls that are enqueued together; 0: alone


class Recorder:
    """Writes the events of this process to a file."""

    def __init__(self, folder: Path) -> None:
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        from megatron_stppo.parallel import bridge
        from megatron_stppo.replicas.wire import weights

        folder.mkdir(exist_ok=True)
        self._file = (folder / f"{os.getpid()}-{time.time_ns()}").open("w", buffering=1)
        self._own, self._batches, self._world = threading.local(), itertools.count(1), ""
        self._joined, self._over_gloo = set[str](), set[str]()  # names of groups
        for kind in (*EQUAL, *UNEQUAL, *PAIR):
            setattr(dist.ProcessGroup, kind, self._collective(kind, getattr(dist.ProcessGroup, kind)))
        of_torch = ("init_process_group", "new_group", "batch_isend_irecv")
        for module, names in ((dist, of_torch), (bridge, ("join", "leave")), (weights, ("call_unless",))):
            for name in names:
                setattr(module, name, partial(getattr(self, f"_{name}"), getattr(module, name)))
        for name, kind in OF_VLLM.items():
            setattr(CpuCommunicator, name, self._of_vllm(kind, getattr(CpuCommunicator, name)))

    def _write(
        self, group: Any, kind: str, what: str = "", on_host: bool = False, in_engine: bool = False
    ) -> None:
        name = group.group_name
        full = name if name in self._joined else f"{self._world}/{name}"
        at = full, group.size(), group.rank(), kind, what, self._thread()
        on_gpu = in_engine or (not on_host and name not in self._over_gloo)
        event = Event(*at, on_gpu, getattr(self._own, "batch", 0))
        self._file.write(json.dumps(event) + "\n")

    def _thread(self) -> str:
        acting, current = getattr(self._own, "acting", [""])[0], threading.current_thread()
        return acting or (MAIN if current is threading.main_thread() else current.name)

    def _collective(self, kind: str, call: Any) -> Callable[..., Any]:
        def method(group: Any, *given: Any, **named: Any) -> Any:
            values = (*given, *named.values())
            what = [f"root {x.rootRank}" for x in values if hasattr(x, "rootRank")]
            what += [f"{x.dtype} {tuple(x.shape)}" for x in tensors_in(values)] * (kind in EQUAL)
            records = _is_called_by("parallel/collectives.py")
            self._write(group, kind, str(given[1]) if kind in PAIR else ", ".join(what), records)
            return call(group, *given, **named)

        return method

    def _of_vllm(self, kind: str, call: Any) -> Callable[..., Any]:
        def method(communicator: Any, tensor: Any, *given: Any, **named: Any) -> Any:
            what = f"{tensor.dtype} {tuple(tensor.shape)}"
            self._write(communicator.device_group, kind, what, in_engine=True)
            return call(communicator, tensor, *given, **named)

        return method

    def _init_process_group(self, make: Any, *given: Any, **named: Any) -> None:
        make(*given, **named)
        own = f"world-{os.getpid()}-{time.time_ns()}"
        store = dist.distributed_c10d._get_default_store()
        self._world = store.compare_set("orders", "", own).decode()  # that of the first rank that comes
        self._over_gloo.clear()

    def _new_group(self, make: Any, *given: Any, **named: Any) -> Any:
        group = make(*given, **named)
        if isinstance(group, dist.ProcessGroup):
            if "gloo" in (named.get("backend"), *given[2:3]):
                self._over_gloo.add(group.group_name)
            self._write(group, "new_group")
        return group

    def _join(self, make: Any, store: Any, name: str, **named: Any) -> Any:
        self._joined.add(name)
        if named.get("over_host"):
            self._over_gloo.add(name)
        group = make(store, name, **named)
        self._write(group, "join")
        return group

    def _leave(self, call: Any, group: dist.ProcessGroup) -> None:
        self._write(group, "leave")
        call(group)

    def _call_unless(self, call: Any, function: Callable[[], Any], *given: Any) -> Any:
        acting = [self._thread()]

        def as_caller() -> Any:
            self._own.acting = acting
            return function()

        try:
            return call(as_caller, *given)
        finally:
            acting[0] = ""  # a function that was given up may still run

    def _batch_isend_irecv(self, call: Any, operations: Any) -> Any:
        self._own.batch = next(self._batches)
        try:
            return call(operations)
        finally:
            self._own.batch = 0


def start() -> None:
    """Record what this process does from now on, if FOLDER is set."""
    if folder := os.environ.get(FOLDER):
        Recorder(Path(folder))


def findings(folder: Path) -> list[str]:
    """Return what would hang on GPUs, one line each, in a run whose processes have ended without an error."""
    runs = [[Event(*json.loads(x)) for x in f.read_text().splitlines()] for f in sorted(folder.iterdir())]
    assert any(runs), "nothing was recorded"
    others = Counter((e.thread, e.group, e.rank, e.kind) for e in itertools.chain(*runs) if _is_apart(e))
    lines = [f"thread {t}, group {g}, rank {r}: {kind}, {n} times" for (t, g, r, kind), n in others.items()]
    return [*lines, *(_unequal(runs) or _unmatched(runs) or _circles(runs))]


def _is_apart(event: Event) -> bool:
    return event.on_gpu and event.thread != MAIN


def _unequal(runs: list[list[Event]]) -> list[str]:
    """Return the groups whose ranks did not call the same collectives in the same order."""
    called: dict[tuple[str, int], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for event in itertools.chain(*runs):
        if event.kind in EQUAL + UNEQUAL:
            called[event.group, event.size][event.rank].append(f"{event.kind} {event.what}")
    lines = []
    for (group, size), ranks in called.items():
        calls = itertools.zip_longest(*(ranks[rank] for rank in range(size)), fillvalue="nothing")
        first = next(((at, *call) for at, call in enumerate(calls) if len(set(call)) > 1), None)
        lines += [f"group {group}, call {first[0]}: {'; '.join(first[1:])}"] if first else []
    return lines


def _unmatched(runs: list[list[Event]]) -> list[str]:
    """Return the pairs of ranks of which one sends more often than the other receives, or less often."""
    counts: Counter[str] = Counter()
    for event in itertools.chain(*runs):
        if event.kind in PAIR:
            counts[_pair(event)] += 1 if event.kind == "send" else -1
    return [f"{pair}: {n:+} sent without a receive" for pair, n in counts.items() if n]


def _pair(event: Event) -> str:
    """Return the group of a send or recv, and from which rank it is to which."""
    ends = [str(event.rank), event.what][:: 1 if event.kind == "send" else -1]
    return f"group {event.group}, {' to '.join(ends)}"


def _circles(runs: list[list[Event]]) -> list[str]:
    """Return calls of which each comes before the next one on some rank, and the last before the first."""
    before: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        named = list(_named(run))
        for thread in {event.thread for event, _ in named}:
            # a GPU has one order for all threads
            own = [x for x in named if x[0].thread == thread or (thread == MAIN and x[0].on_gpu)]
            last: set[str] = set()
            for _, calls in itertools.groupby(own, lambda x: x[0].batch or x[1]):
                together = {name for _, name in calls}
                for name in together:
                    before[name] |= last
                last = together
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return [f"contradictory orders: {' < '.join(error.args[1])}"]
    return []


def _named(run: list[Event]) -> Iterator[tuple[Event, str]]:
    """Yield the calls of a rank with a name that the same call has on the other ranks."""
    counts: Counter[str] = Counter()
    for event in run:
        name = event.group
        if event.kind in PAIR:
            name = _pair(event)
        elif event.kind not in EQUAL + UNEQUAL:
            continue
        counts[name] += 1
        yield event, f"{name} call {counts[name]}"


def _is_called_by(file: str) -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame is not None
