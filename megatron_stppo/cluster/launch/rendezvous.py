"""The rendezvous of the ranks: the store they connect to, the network interfaces they listen on, and the open
files that their connections need.

torch's store listens on every interface unless it is given a socket. The store, gloo and NCCL accept
connections without authentication. This module cannot restrict the store that torchrun opens (SECURITY.md).
"""

import ipaddress
import logging
import os
import resource
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_stppo.config import ConfigError

LOOPBACK = "lo"  # its name on Linux
GLOO_INTERFACE, NCCL_INTERFACE = INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LAZY = "TORCH_GLOO_LAZY_INIT"  # if 1, gloo connects two ranks when they first exchange data
EAGER = 64  # ranks, up to which gloo connects all ranks of a group when the group is made
CONNECT = 10.0  # seconds until a connection must be open
OTHER_FILES = 1024  # open files of a rank besides its connections to other ranks: libraries, logs, tools
log = logging.getLogger(__name__)


def open_store(timeout: timedelta) -> dist.Store:
    """Return the store of `meeting`, or torchrun's, without waiting for the other ranks."""
    arguments = meeting(timeout, wait=False)
    return arguments["store"] if "store" in arguments else next(dist.rendezvous("env://", timeout=timeout))[0]


def meeting(timeout: timedelta, wait: bool = True, is_alone: bool = True) -> dict[str, Any]:
    """Return arguments of init_process_group with which the store listens only on MASTER_ADDR's interface.

    wait: whether the first rank waits until all others are connected to the store. is_alone: no program on
    another host will share a group of NCCL with these ranks.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A single rank opens no port. If all ranks are on this
    host, gloo and NCCL also use the loopback interface only, unless the user has set an interface, or, for
    NCCL, the program is not alone.

    Unless the user has set TORCH_GLOO_LAZY_INIT, up to EAGER ranks are connected when a group is made, so
    that the death of one ends the collectives of the others at once: a rank that first waits for a connection
    from a dead one does so until its timeout. More ranks are connected when they first exchange data, because
    each has world - 1 connections in several groups.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault(LAZY, str(int(world > EAGER)))
    is_local = world == int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if is_local:
        for name in INTERFACES if is_alone else (GLOO_INTERFACE,):
            os.environ.setdefault(name, LOOPBACK)
    arguments: dict[str, Any] = {"timeout": timeout, "rank": rank, "world_size": world}
    if world == 1:
        return arguments | {"store": dist.HashStore()}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {"timeout": timeout}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = _listen(address, port, is_local) if rank == 0 else None
    store = dist.TCPStore(address, port, world, rank == 0, timeout, wait, master_listen_fd=own)
    return arguments | {"store": store}


def host_store(address: str, timeout: timedelta) -> tuple[dist.TCPStore, int]:
    """Open a store for processes outside the default group, and return it with its port, a free one.

    It listens on the interface of `address` only, and ends with the last reference to it. timeout: of the
    operations of the returned store. Raises OSError if this host does not have the address.
    """
    descriptor = _create_server(address, 0)
    with socket.socket(fileno=os.dup(descriptor)) as listening:
        port: int = listening.getsockname()[1]
    return dist.TCPStore(address, port, None, True, timeout, False, master_listen_fd=descriptor), port


def connect_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store of host_store(). Raises RuntimeError if that takes longer than `timeout`."""
    return dist.TCPStore(host, port, None, False, timeout, False)


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the interface over which it reaches a server at host:port.

    Example: "127.0.0.1" for a server that listens on the loopback interface.
    Raises OSError if the server does not accept a connection.
    """
    with socket.create_connection((host, port), timeout=CONNECT) as connection:
        return str(connection.getsockname()[0])


def check_nccl_interface(address: str) -> None:
    """Raise ConfigError if NCCL would use the loopback interface, but this host's address is another one.

    `meeting` sets the interface of a program that is alone on this host. NCCL reads it once.
    """
    name = os.environ.get(NCCL_INTERFACE)
    if torch.cuda.is_available() and name == LOOPBACK and not ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            f"NCCL_SOCKET_IFNAME={name}: the ranks of the other program connect to {address}; set it to the "
            "interface of that address before starting this program"
        )


def files_needed(world: int, replicas: int = 0, tensor: int = 1) -> int:
    """Return how many files a rank of `world` may have open, with `replicas` of `tensor` ranks each.

    A gloo group of n ranks has up to n - 1 connections on every rank, and several of megatron's groups may
    contain most ranks. The link to a replica (replicas/wire/) has world + tensor - 1 connections, 5 files
    of gloo's device and of a connection to the store, and on the first rank world + 2 * tensor of the store's
    server. NCCL's own files are not counted.
    """
    return 4 * world + OTHER_FILES + replicas * (2 * world + 3 * tensor + 4)


def raise_file_limit(world: int, replicas: int = 0, tensor: int = 1) -> None:
    """Raise the soft limit on open files to the hard limit. Arguments: see files_needed.

    The first rank of a node warns if the hard limit is below that.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = files_needed(world, replicas, tensor)
    if hard != resource.RLIM_INFINITY and hard < needed and os.environ.get("LOCAL_RANK", "0") == "0":
        log.warning(
            "the hard limit on open files (ulimit -Hn) is %d, but a run of %d ranks%s may need %d; raise it "
            "on this host, with LimitNOFILE of slurmd.service or in /etc/security/limits.conf",
            hard,
            world,
            f" and {replicas} replicas" if replicas else "",
            needed,
        )


def _listen(address: str, port: int, is_local: bool) -> int | None:
    """Return the file descriptor of a socket that listens on this address.

    Returns None if torch must listen on all interfaces: there are several hosts, and this host resolves its
    own name to a loopback address, which the other hosts could not reach.
    """
    resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4]
    if ipaddress.ip_address(resolved[0]).is_loopback and not is_local:
        return None
    return _create_server(address, port)


def _create_server(address: str, port: int) -> int:
    """Return the file descriptor of a socket that listens on this address. Port 0: on a free port."""
    family, _, _, _, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(resolved[0]), port), family=family).detach()
