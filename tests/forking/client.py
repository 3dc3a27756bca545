"""Ask the server for a process, and stand for it: see tests/forking/stand_in.py.

A copy of this file lies beside the server's socket. It imports little, because it starts often.
"""

import os
import signal
import socket
import sys
from typing import Any

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Exit with the status of the process, or by the signal that ended it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a process
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(os.path.join(os.path.dirname(__file__), "socket"))
        request = describe()
        socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(request)
        reply = server.makefile("r")
        process = int(reply.readline())

        def forward(number: int, frame: Any) -> None:
            try:
                os.kill(process, number)
            except ProcessLookupError:  # it has just ended
                pass

        for number in FORWARDED:
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = int(reply.readline() or 255)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)  # at the end of Python a signal would end it first


def describe() -> bytes:
    umask = os.umask(0)
    os.umask(umask)
    words = [str(os.getpid()), str(umask), os.getcwd(), str(len(sys.argv) - 1), *sys.argv[1:]]
    words += [f"{name}={value}" for name, value in os.environ.items()]
    return "\0".join(words).encode(errors="surrogateescape")


if __name__ == "__main__":
    main()
