"""Give up what ranks wait for, because of what only one of them knows.

A collective does not always raise when a peer dies. Gloo (torch 2.13) loses the error of a send that waits
for its receiver, if the connection breaks as the event thread begins to write: in 3 of 12 syncs of weights
whose receiver was killed, a rank waited for the timeout. NCCL detects only what the network reports, which
for peers on one host is nothing.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
POLL = 0.1  # seconds between two calls of reason()
ASKS = 1.0  # seconds between two questions to the store
KEY = "reason"  # in the store
GRACE = 1.0  # seconds that a function gets to end after it was released


class GivenUp(RuntimeError):
    """A call was given up before it returned."""


def call_unless(
    function: Callable[[], Result], reason: Callable[[], str], release: Callable[[str], None]
) -> Result:
    """Return function(), or raise its exception. Give it up as soon as reason() is not empty.

    The function is called in a thread of its own, on this thread's CUDA stream. To give it up means to call
    release(reason()), which should make it return or raise, and to raise GivenUp(reason()), although the
    function may still be running: it must not change what the caller uses afterwards.
    Example: call_unless(dist.barrier, lambda: "rank 3 is lost" if lost.is_set() else "", abort)
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def call() -> None:
        try:
            if stream is not None:  # or leaving the stream's context would create a context on the first GPU
                torch.cuda.set_device(stream.device)
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                results.append(function())
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=call, name="collective", daemon=True)
    thread.start()
    thread.join(POLL)
    while thread.is_alive():
        if why := reason():
            release(why)
            thread.join(GRACE)
            raise GivenUp(why)
        thread.join(POLL)
    if errors:
        raise errors.pop()
    return results.pop()


def on_any_rank(own: Callable[[], str]) -> Callable[[], str]:
    """Return a function that returns own(), or a text soon after it has found a reason on another rank.

    It asks the store of the default group, so it is no collective: engines of an evaluation, which do not
    advance together, can call it.
    """
    store, asked, found = dist.distributed_c10d._get_default_store(), -ASKS, ""

    def reason() -> str:
        nonlocal asked, found
        if not found and (found := own()):
            store.set(KEY, found)
        elif not found and time.monotonic() - asked > ASKS:
            asked = time.monotonic()
            found = "another rank received notice" if store.check([KEY]) else ""
        return found

    return reason
