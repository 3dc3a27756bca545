"""Measure how trajectories reach the ranks that train on them, on many light processes of one host.

    python tools/benchmark_data_path.py [--ranks 4 8 16 32 64] [--per-rank 8] [--tokens 1000] [--tensor 4]

Every rank is a process without a model, and ranks communicate over gloo. Engine and training both have a
tensor parallel size of --tensor; the other ranks are data parallel. Trajectories are synthetic: they have 4
turns, and half of their tokens are action tokens. Two paths are compared, each in processes of its own:

    all to all   all ranks gather and decode all trajectories and build the whole batch
    divided      that of the package: all ranks gather summaries and log-probs, and get only the tokens that
                 they train on

For each path and number of ranks, the first table has the largest value of any rank for the exchange of one
iteration: bytes received over TCP (counted by the kernel), processor time and additional peak memory. A
second table has the time of the messages between two engine steps if the environments have not answered.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from megatron_stppo.config import Config
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.packing import PackingSpec, to_batch
from megatron_stppo.launch import process
from megatron_stppo.parallel.collectives import broadcast_bytes, encode, gather_records
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.types import Batch, Task, Trajectory, Turn

EMPTY_NEWS = {"answers": (), "trouble": "", "away": ""}  # what was sent, whether or not there was any
STEPS = 200  # broadcasts that are timed


def trajectory(number: int, tokens: int) -> Trajectory:
    """Return 4 turns of tokens / 8 action tokens, each with an observation of the same length."""
    draw = torch.Generator().manual_seed(number)
    size = tokens // 8

    def ids() -> tuple[int, ...]:
        return tuple(torch.randint(150_000, (size,), generator=draw).tolist())

    def turn() -> Turn:
        return Turn(ids(), tuple((-torch.rand(size, generator=draw)).tolist()), ids(), 0.5, ((3, size),))

    return Trajectory(
        Task("t", (), ("a",), "train", number), (1, 2, 3), tuple(turn() for _ in range(4)), "ok"
    )


def to_all(of_replica: list[Trajectory], tensor: int) -> Batch:
    """Gather all trajectories on every rank; the first rank of each replica sends those of the replica."""
    sent = of_replica if dist.get_rank() % tensor == 0 else []
    return to_batch([t for part in gather_records(sent, Trajectory) for t in part])


def divided(of_replica: list[Trajectory], tensor: int) -> Batch:
    """Get the tokens that this rank trains on, with the package's code and without models."""
    # megatron may be imported only after process.prepare
    from megatron_stppo.learner import Learner
    from megatron_stppo.model.pipeline import Packer
    from megatron_stppo.parallel.groups import MeshRank
    from megatron_stppo.stages import distribute

    rank, world = dist.get_rank(), dist.get_world_size()
    layout = Layout(tensor=tensor, data=world // tensor)
    mesh = MeshRank(rank, world, rank % tensor, tensor, 0, 1, 0, 1, rank // tensor, world // tensor, layout)
    config = Config.model_validate({"model": {"path": "m"}, "parallel": {"tensor": tensor}})
    packer = Packer(PackingSpec(16_384), mesh, 4096, "cpu")
    models: Any = (None, [], None, None, None, packer, None)
    first = len(of_replica) // tensor * (rank % tensor)
    own = of_replica[first : first + len(of_replica) // tensor]
    return distribute(Learner(config, mesh, *models), Played.of(own), 0)


PATHS: dict[str, Callable[[list[Trajectory], int], Batch]] = {"all to all": to_all, "divided": divided}


def received() -> int:
    """Return the bytes that this process has received over its open TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family != socket.AF_UNIX:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("Q", info, 128)[0]  # tcpi_bytes_received of linux/tcp.h
        except OSError:  # not a socket, or closed by now
            continue
    return total


def memory(field: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, field
    return int(found[1]) * 1024


def exchange(path: str, per_rank: int, tokens: int, tensor: int) -> tuple[float, ...]:
    """Return the bytes received, the CPU seconds, the peak memory and the tokens held of one iteration."""
    first = dist.get_rank() // tensor * tensor * per_rank
    of_replica = [trajectory(n, tokens) for n in range(first, first + tensor * per_rank)]
    PATHS[path]([trajectory(dist.get_rank(), 8)] * tensor, tensor)  # opens the connections
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    resident, before, started = memory("VmRSS"), received(), time.process_time()
    batch = PATHS[path](of_replica, tensor)
    seconds = time.process_time() - started
    return received() - before, seconds, memory("VmHWM") - resident, len(batch.tokens_P)


def silence(sent: bytes) -> tuple[float, ...]:
    """Return the seconds of one broadcast of `sent` from rank 0, on average over STEPS."""
    broadcast_bytes(sent, 0)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(STEPS):
        broadcast_bytes(sent, 0)
    return ((time.perf_counter() - started) / STEPS,)


def largest(world: int, function: Callable[..., tuple[float, ...]], *args: Any) -> list[float]:
    """Run the function on `world` forked processes and return the largest value of any rank, per column."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pipes = []
    for rank in range(world):
        receive, send = os.pipe()
        if os.fork() == 0:
            try:
                at = f"tcp://127.0.0.1:{port}"
                dist.init_process_group("gloo", at, rank=rank, world_size=world)
                os.write(send, json.dumps(function(*args)).encode())
                dist.barrier()
            finally:
                os._exit(0)  # at once: to leave the group in order takes longer than the measurement
        os.close(send)
        pipes.append(os.fdopen(receive))
    return [max(column) for column in zip(*map(json.load, pipes), strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--per-rank", type=int, default=8, help="trajectories per rank")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a trajectory")
    parser.add_argument("--tensor", type=int, default=4)
    given = parser.parse_args(argv)
    os.environ |= {"TORCH_GLOO_LAZY_INIT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    process.prepare(engine=False)
    import megatron_stppo.stages  # noqa: F401 - loaded once, before the processes are forked

    print("| ranks | path | MB received | CPU seconds | peak memory, MB | tokens held |")
    print("|---|---|---|---|---|---|")
    for world in given.ranks:
        for path in PATHS:
            size, seconds, peak, held = largest(
                world, exchange, path, given.per_rank, given.tokens, given.tensor
            )
            cells = (world, path, f"{size / 1e6:.2f}", f"{seconds:.2f}", f"{peak / 1e6:.0f}", f"{held:,.0f}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print("\n| ranks | empty news, two broadcasts (µs) | one broadcast (µs) |\n|---|---|---|")
    for world in (2, 4, 8):
        two, one = (largest(world, silence, sent)[0] * 1e6 for sent in (encode(EMPTY_NEWS), b""))
        print(f"| {world} | {two:.0f} | {one:.0f} |", flush=True)


if __name__ == "__main__":
    main()
