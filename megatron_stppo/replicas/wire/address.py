"""The address at which a trainer listens for its replicas."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

from megatron_stppo.base.printing import one_line
from megatron_stppo.cluster.launch import slurm
from megatron_stppo.cluster.launch.slurm import LOOPBACK
from megatron_stppo.config import ConfigError

BACKLOG = 1024  # connections that the system holds until they are accepted: all replicas may start at once


def find(given: str | None, starts_replicas: bool, environment: Mapping[str, str]) -> str:
    """Return the IP address of the interface that replicas and the trainer's other ranks connect to.

    given: serving.address. starts_replicas: the trainer starts its replicas, on its own machine. environment:
    with torchrun's variables, which srun's tasks get from `discover` (cluster/launch/process.py).
    Raises ConfigError if the address is not that of one interface, or is a loopback address although ranks or
    replicas are on other machines.
    """
    is_local = environment.get("WORLD_SIZE", "1") == environment.get("LOCAL_WORLD_SIZE", "1")
    if given:
        name = given
    elif is_local and starts_replicas:
        name = LOOPBACK
    else:
        name = environment.get("MASTER_ADDR", LOOPBACK)
        if name == LOOPBACK and slurm.started_by_srun(environment):
            # The ranks of a step on one node connect over its loopback interface. The replicas are other
            # steps, which may be on other nodes.
            name = slurm.first_ranks_host(environment)
    found = _interface(name)
    elsewhere = not is_local or (not starts_replicas and slurm.is_part_of_the_job(environment))
    if found.is_loopback and elsewhere:
        raise ConfigError(
            f"serving.address={name}: is a loopback address, which ranks and replicas on other machines "
            "cannot reach; give the address of an interface that connects them"
        )
    return str(found)


def check(given: str | None, starts_replicas: bool, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if find() does, or if this is the first rank and cannot listen at the address."""
    address = find(given, starts_replicas, environment)
    if environment.get("RANK", "0") == "0":
        listen(address).close()


def listen(address: str) -> socket.socket:
    """Return a socket that listens on one interface of this machine, at a port that the system chooses.

    Raises ConfigError if the address is not one of this machine's, or stands for all interfaces.
    """
    ip = _interface(address)
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    try:
        return socket.create_server((str(ip), 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"serving.address={one_line(address)}: cannot listen on {ip} "
            f"({os.strerror(error.errno or 0)}); give the address of a network interface of this machine"
        ) from None


def _interface(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of one interface. Raises ConfigError if `address` is not one, or stands for all."""
    try:
        found = ipaddress.ip_address(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"serving.address={one_line(address)}: is not known ({one_line(str(error))}); give the address "
            "of a network interface of this machine, for example 127.0.0.1"
        ) from None
    if found.is_unspecified:
        raise ConfigError(
            f"serving.address={one_line(address)}: means every interface of this machine; give the address "
            "of the one that replicas connect to"
        )
    return found


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
