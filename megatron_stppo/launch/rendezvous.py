"""Where ranks meet, and on which interfaces they listen.

torch's store listens on every interface unless it is handed a socket, and neither it nor gloo and NCCL ask
who is calling. The store that torchrun opens is not in our hands (SECURITY.md).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LOOPBACK = "lo"  # Linux's name of it
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def meeting(timeout: timedelta) -> dict[str, Any]:
    """What init_process_group is given so that the ranks meet on MASTER_ADDR's interface alone; reads RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    A single rank meets nobody and opens no port. Ranks that all are on this host also talk over the loopback
    only, unless the user has named an interface.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_local = world == int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if is_local:
        for name in INTERFACES:
            os.environ.setdefault(name, LOOPBACK)
    given: dict[str, Any] = {"timeout": timeout, "rank": rank, "world_size": world}
    if world == 1:
        return given | {"store": dist.HashStore()}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {"timeout": timeout}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = _listen(address, port, is_local) if rank == 0 else None
    store = dist.TCPStore(address, port, world, rank == 0, timeout, master_listen_fd=own)
    return given | {"store": store}


def _listen(address: str, port: int, is_local: bool) -> int | None:
    """The descriptor of a socket that listens on this address; None: torch is to listen everywhere, because
    this host knows its own name as a loopback address, where the others would not find it."""
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(found[0]).is_loopback and not is_local:
        return None
    return socket.create_server((str(found[0]), port), family=family).detach()
