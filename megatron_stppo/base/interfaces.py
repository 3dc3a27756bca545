"""Sockets that listen on one network interface of this machine, which a field of the configuration names."""

import errno
import ipaddress
import os
import socket

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.base.printing import one_line

BACKLOG = 1024  # connections that the system holds until they are accepted: all clients may start at once
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listen(field: str, name: str, clients: str) -> socket.socket:
    """Return a socket that listens at the address, at a port that the system chooses.

    name: an IP address or a host name. Raises ConfigError if it is not one of this machine's, or stands for
    all interfaces; the error names the `field`, and the `clients` that will connect.
    """
    ip = resolve(field, name, clients)
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    try:
        return socket.create_server((str(ip), 0), family=family, backlog=BACKLOG)
    except OSError as error:
        here = error.errno == errno.EADDRNOTAVAIL
        remedy = "give the address of a network interface" if here else "free ports or file descriptors"
        raise ConfigError(
            f"{field}={one_line(name)}: cannot listen on {ip} ({os.strerror(error.errno or 0)}); {remedy} of "
            "this machine"
        ) from None


def resolve(field: str, name: str, clients: str) -> Address:
    """Return the address of one interface. Raises ConfigError if `name` is unknown, or stands for all."""
    try:
        found = ipaddress.ip_address(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:  # ValueError also for a name that is too long, or has a null byte
        raise ConfigError(
            f"{field}={one_line(name)}: is not known ({one_line(str(error))}); give the address of a network "
            "interface of this machine, for example 127.0.0.1"
        ) from None
    if found.is_unspecified:
        raise ConfigError(
            f"{field}={one_line(name)}: means every interface of this machine; give the address of the one "
            f"that {clients} connect to"
        )
    return found
