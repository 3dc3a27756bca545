"""Measure how many episodes per second the trainer's first rank can take from its replicas.

    python tools/benchmark_transport.py [--gpus 64 256 1024] [--seconds 10]

Replicas are simulated: two other processes hold a real Dialer for each replica. They answer every Play (a
message with one episode to play) at once with a Done (a message with the played episode). The first rank is
this process, with a real Listener. For every episode it decodes the Done, checks it
(Expected.fault), and encodes the Play of the next one.

The number of episodes per second that a run needs is not measured. It follows from assumptions:

    --rate         tokens that one GPU generates per second
    --tokens       tokens of an episode; half of them are generated, the rest are prompt and observations
    --turns        turns of an episode
    --per-replica  GPUs of one replica; all GPUs serve, which is more than in any real run

The first table has the requirement: 10 times that number. The second table has the measurements, made while
the simulated replicas used the same processors. Its columns of milliseconds are processor time of this
process per episode: of the thread that decodes, checks and assigns, and of all threads, which also receive.
A thread with a processor of its own could process 1000 divided by the first number per second.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from megatron_stppo.base.types import Message, Task, Trajectory, Turn
from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.wire import keys
from megatron_stppo.replicas.wire.dialer import Dialer
from megatron_stppo.replicas.wire.listener import Listener
from megatron_stppo.replicas.wire.messages import Alive, Assignment, Done, Hello, Play, message_limit, pack

VOCABULARY = 151_936
TIMES = 10  # how much more than the expected rate is needed
PROCESSES = 2  # that hold the simulated replicas
WARM_UP = 2.0  # seconds
QUESTION = Message("user", "Question: " + "which of these was first? " * 20)  # about 500 characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--per-replica", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--in-progress", type=int, default=4, help="episodes in progress on each replica")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--replicas-of", type=Path, help=argparse.SUPPRESS)  # a process of simulated replicas
    parser.add_argument("--replicas", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.replicas_of:
        return serve(given.replicas_of, given.replicas, trajectory(given.tokens, given.turns))
    size = len(pack(Done(1, trajectory(given.tokens, given.turns)), message_limit(given.tokens)))
    expected = {gpus: gpus * given.rate / (given.tokens / 2) for gpus in given.gpus}
    print(f"a Done has {size} bytes\n")
    print(
        "| GPUs | replicas | episodes/s assumed | needed: episodes/s | messages/s | MB/s |\n"
        + "|--:" * 6
        + "|"
    )
    for gpus, rate in expected.items():
        needed, messages = TIMES * rate, 2 * TIMES * rate
        print(
            f"| {gpus} | {count(gpus, given)} | {rate:.0f} | {needed:.0f} | {messages:.0f} "
            f"| {needed * size / 1e6:.0f} |"
        )
    print("\n| GPUs | load before | episodes/s | MB/s | x assumed | ms, checking thread | ms, all threads |")
    print("|--:" * 7 + "|")
    for gpus, rate in expected.items():
        load = os.getloadavg()[0]
        found, own, every = measure(count(gpus, given), given)
        print(
            f"| {gpus} | {load:.1f} | {found:.0f} | {found * size / 1e6:.0f} | {found / rate:.1f} "
            f"| {1000 * own:.2f} | {1000 * every:.2f} |",
            flush=True,
        )


def count(gpus: int, given: argparse.Namespace) -> int:
    """Return the number of replicas."""
    return max(1, gpus // given.per_replica)


def measure(replicas: int, given: argparse.Namespace) -> tuple[float, float, float]:
    """Return episodes per second, and seconds per episode of this thread and of this process."""
    task = trajectory(given.tokens, given.turns).task
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        listener = stack.enter_context(closing(Listener("127.0.0.1", message_limit(given.tokens))))
        keys.write(Path(folder), listener.connection)
        for each in range(PROCESSES):
            part = replicas // PROCESSES + (each < replicas % PROCESSES)
            stack.enter_context(simulated(Path(folder), part, given))
        joined = 0
        while joined < replicas:
            for peer, message in listener.take(1.0):
                if isinstance(message, Hello):
                    joined += 1
                    for _ in range(given.in_progress):
                        listener.send(peer, next_episode(task, 0))
        exchange(listener, task, given.tokens, WARM_UP)
        before = time.perf_counter(), time.thread_time(), time.process_time()
        episodes = exchange(listener, task, given.tokens, given.seconds)
        after = time.perf_counter(), time.thread_time(), time.process_time()
    wall, own, all_threads = (b - a for a, b in zip(before, after, strict=True))
    return episodes / wall, own / episodes, all_threads / episodes


def exchange(listener: Listener, task: Task, tokens: int, seconds: float) -> int:
    """Take, check and assign episodes for some seconds; return how many."""
    expected = Expected("", VOCABULARY, "", "", max_context=tokens)
    episodes, ends = 0, time.perf_counter() + seconds
    while time.perf_counter() < ends:
        for peer, message in listener.take(0.1):
            if isinstance(message, Done):
                why = expected.fault(message, held={7})
                assert not why, why
                listener.send(peer, next_episode(task, message.number))
                episodes += 1
            else:
                assert isinstance(message, Alive), message
    return episodes


def next_episode(task: Task, number: int) -> Play:
    return Play((Assignment(number + 1, task, number, number, number, 1.0, 1.0),))


@contextmanager
def simulated(folder: Path, replicas: int, given: argparse.Namespace) -> Iterator[None]:
    """Run a process of simulated replicas."""
    options = {
        "--tokens": given.tokens,
        "--turns": given.turns,
        "--replicas": replicas,
        "--replicas-of": folder,
    }
    words = [str(word) for pair in options.items() for word in pair]
    process = subprocess.Popen((sys.executable, __file__, *words))
    try:
        yield
    finally:
        process.kill()
        process.wait()


def serve(folder: Path, replicas: int, played: Trajectory) -> None:
    """Hold simulated replicas, each of which answers every episode at once. Ends when it is killed."""
    connection, limit = keys.find(folder, 60.0), message_limit(len(played.token_ids))
    dialers = [Dialer(connection, limit) for _ in range(replicas)]
    for number, dialer in enumerate(dialers):
        dialer.send(
            Hello(f"{os.getpid()}-{number}", "digest", VOCABULARY, "bfloat16", "0", 8, 4, "simulated")
        )
    while True:
        busy = False
        for dialer in dialers:
            for message in dialer.take(0.0):
                assert isinstance(message, Play)
                busy = True
                dialer.send(Done(message.episodes[0].number, played))
        if not busy:
            time.sleep(0.001)


def trajectory(tokens: int, turns: int) -> Trajectory:
    """Return an episode: a prompt and observations of together as many tokens as the turns."""
    draw, each = random.Random(1), tokens // (2 * turns)

    def ids() -> tuple[int, ...]:
        return tuple(draw.randrange(VOCABULARY) for _ in range(each))

    played = tuple(
        Turn(ids(), tuple(-draw.random() for _ in range(each)), ids() if turn else (), 0.0, ((7, each),))
        for turn in reversed(range(turns))
    )
    task = Task("search", (QUESTION,), ("an answer",), "train", 1, {"level": "hard"})
    return Trajectory(task, ids(), played, "ok", tool_calls=turns - 1, valid_actions=turns)


if __name__ == "__main__":
    main()
