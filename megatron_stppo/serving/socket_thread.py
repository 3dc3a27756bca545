"""The thread that owns the zmq sockets of a Listener or a Dialer. zmq's sockets are not thread-safe.

Other threads append to a queue and call `signal`; only this thread calls the sockets' methods.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import zmq

log = logging.getLogger(__name__)

LINGER = 2.0  # seconds that closing waits for messages to be sent


class SocketThread:
    """A zmq context of its own, a thread, and a file descriptor that wakes the thread out of its poll.

    Every Listener and Dialer has its own context, because the authentication of CURVE clients is per context.
    """

    def __init__(self, name: str) -> None:
        self.context = zmq.Context()
        self.poller = zmq.Poller()
        self.closing = threading.Event()
        self.failure: BaseException | None = None
        self._name, self._thread = name, threading.Thread()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._signalled = False  # saves most of the system calls when much is sent
        self._lock = threading.Lock()  # guards the two above; the number _wakeup may be reused after close()
        self.poller.register(self._wakeup, zmq.POLLIN)

    def start(self, run: Callable[[], None], ended: Callable[[], None]) -> None:
        """Run `run`, which returns soon after `closing` is set and has then closed its sockets.

        ended: called when it has returned or raised; `failure` is the exception.
        """
        self._thread = threading.Thread(target=self._run, args=(run, ended), name=self._name, daemon=True)
        self._thread.start()

    def signal(self) -> None:
        """Wake the thread. May be called by any thread at any time."""
        with self._lock:
            if self._wakeup >= 0 and not self._signalled:
                self._signalled = True
                os.eventfd_write(self._wakeup, 1)

    def wait(self, seconds: float) -> dict[object, int]:
        """Return what is ready, as Poller.poll does, after at most `seconds`. Only for the thread itself."""
        ready = dict(self.poller.poll(max(0, int(seconds * 1000) + 1)))
        if ready.pop(self._wakeup, None):
            with self._lock:  # the caller looks at its queues after this, never before
                os.eventfd_read(self._wakeup)
                self._signalled = False
        return ready

    def check(self) -> None:
        """Raise RuntimeError if the thread has failed."""
        if self.failure is not None:
            raise RuntimeError(f"{self._name}: the thread of the socket has ended") from self.failure

    def close(self) -> None:
        """Stop the thread and free the context. Takes at most 2 * LINGER seconds. May be called twice."""
        self.closing.set()
        self.signal()
        if self._thread.ident is not None:
            self._thread.join(2 * LINGER)
        if self._thread.is_alive():
            log.warning("%s: did not close in %g s; it ends with the process", self._name, 2 * LINGER)
            return
        with self._lock:
            if self._wakeup >= 0:
                os.close(self._wakeup)
            self._wakeup = -1

    def _run(self, run: Callable[[], None], ended: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            log.exception("%s: the thread of the socket has failed", self._name)
            self.failure = error
            self.context.destroy(linger=0)
        else:
            self.context.term()  # waits for the sockets' linger
        finally:
            ended()
