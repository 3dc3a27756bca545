"""The listening sockets of a process and of all its descendants, while it lives."""

from __future__ import annotations

import threading
from typing import NamedTuple

import psutil

EVERY = 0.2  # seconds between samples; a listener of this program lives for its whole run


class Listener(NamedTuple):
    """Example: Listener("agent", "::", 29500). The owner is "agent" for torchrun, "rank" for its children."""

    owner: str
    address: str
    port: int


class Watchdog:
    """A thread that collects listeners.

    Example: with Watchdog(pid) as watchdog: ...; then watchdog.found has every listener that was seen.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.found: set[Listener] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        # a child that was sampled before its exec has the agent's sockets
        agents = {listener[1:] for listener in self.found if listener.owner == "agent"}
        self.found -= {Listener("rank", *place) for place in agents}

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            try:
                processes = [("agent", self._root)]
                processes += [("rank", child) for child in self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for owner, process in processes:
                self._look(owner, process)

    def _look(self, owner: str, process: psutil.Process) -> None:
        try:
            sockets = process.net_connections("inet")
        except psutil.NoSuchProcess:  # it ended between the two calls
            return
        for socket in sockets:
            if socket.status == psutil.CONN_LISTEN:
                self.found.add(Listener(owner, socket.laddr.ip, socket.laddr.port))
