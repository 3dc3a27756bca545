"""Run one function on several gloo ranks, each in a separate process, and return the results of all ranks.

Example: `run_ranks(add_up, 2, 5)` calls `add_up(5)` on two ranks whose default process group is ready, and
returns [rank 0's result, rank 1's result]. `function` must be importable (defined at the top level of a
module), and arguments and results must be picklable. The first rank that raises ends the others, and its
traceback is raised here. On a CPU, ranks are forked from a process that has imported tests/preloaded.py.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_stppo.cluster.launch.process import free_port
from tests import orders

PATIENCE = 10.0  # seconds to wait, after a rank died, for the error message of another rank


class RankError(AssertionError):
    """A rank raised, died or exceeded the timeout. The message has the rank and its traceback."""


def context() -> BaseContext:
    """Return the context in which the processes of tests start."""
    found = mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    found.set_forkserver_preload(["tests.preloaded"])
    return found


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Run function(*args) on ranks 0..world-1 and return the results in rank order. Raises RankError."""
    start, port = context(), free_port()
    environment = dict(os.environ)
    pipes, processes = [], []
    for rank in range(world):
        receive, send = start.Pipe(duplex=False)
        process = start.Process(
            target=_rank, args=(rank, world, port, timeout, environment, send, function, args)
        )
        process.start()
        send.close()  # the child then has the only writing end, so that its death causes an end of file
        pipes.append(receive)
        processes.append(process)
    try:
        return _gather(pipes, time.monotonic() + timeout)
    finally:
        ends = time.monotonic() + (5 if sys.exc_info()[0] is None else 0)
        for process in processes:
            process.join(max(0.0, ends - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _gather(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    dead: list[int] = []
    open_ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_ranks:
        ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_ranks.pop(pipe)
            try:
                failed, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                dead.append(rank)
                deadline = min(deadline, time.monotonic() + PATIENCE)
                continue
            if failed:
                raise RankError(f"rank {rank} raised\n{value}")
            results[rank] = value
    if dead:
        raise RankError(f"rank {dead[0]} died without a result")
    if open_ranks:
        raise RankError(f"ranks {sorted(open_ranks.values())} did not finish in time")
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int,
    world: int,
    port: str,
    timeout: float,
    environment: dict[str, str],
    send: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)  # a forked rank inherits the environment of the first call
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    orders.start()
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
        dist.barrier()  # a rank that exits early would reset connections that other ranks are still opening
        # Send bytes: a tensor sent as an object would be fetched from its process, which may have ended.
        send.send_bytes(pickle.dumps((False, function(*args))))
    except BaseException:  # the parent's message must have any exception of a rank
        send.send_bytes(pickle.dumps((True, traceback.format_exc())))
    finally:
        send.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def leave_group() -> None:
    """Destroy the default process group of run_ranks, so that the program creates its own. Collective.

    The program gets another port: until the first rank has left too, its store would still accept others.
    """
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = port[0]
