"""The address at which a trainer listens for its replicas."""

import ipaddress
import socket
from collections.abc import Mapping

from megatron_stppo.base import interfaces
from megatron_stppo.cluster.launch import slurm
from megatron_stppo.cluster.launch.slurm import LOOPBACK
from megatron_stppo.config import ConfigError

FIELD, CLIENTS = "serving.address", "replicas"  # as errors name them


def find(configured: str | None, starts_replicas: bool, environment: Mapping[str, str]) -> str:
    """Return the IP address of the interface that replicas and the trainer's other ranks connect to.

    configured: serving.address. starts_replicas: the trainer starts its replicas, on its own machine.
    environment: with torchrun's variables, which `discover` (cluster/launch/process.py) sets in srun's tasks.
    Raises ConfigError if the address is not that of one interface, or is a loopback address although ranks or
    replicas are on other machines.
    """
    is_local = environment.get("WORLD_SIZE", "1") == environment.get("LOCAL_WORLD_SIZE", "1")
    if configured:
        name = configured
    elif is_local and starts_replicas:
        name = LOOPBACK
    else:
        name = environment.get("MASTER_ADDR", LOOPBACK)
        if name == LOOPBACK and slurm.started_by_srun(environment):
            # The ranks of a step on one node connect over its loopback interface. The replicas are other
            # steps, which may be on other nodes.
            name = slurm.first_ranks_host(environment)
    interface = interfaces.resolve(FIELD, name, CLIENTS)
    elsewhere = not is_local or (not starts_replicas and slurm.is_part_of_the_job(environment))
    if interface.is_loopback and elsewhere:
        raise ConfigError(
            f"serving.address={name}: is a loopback address, which ranks and replicas on other machines "
            "cannot reach; give the address of an interface that connects them"
        )
    return str(interface)


def check(configured: str | None, starts_replicas: bool, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if find() does, or if this is the first rank and cannot listen at the address."""
    address = find(configured, starts_replicas, environment)
    if environment.get("RANK", "0") == "0":
        listen(address).close()


def listen(address: str) -> socket.socket:
    """Return a socket that listens for replicas at a port that the system chooses.

    Raises ConfigError if the address is not one of this machine's, or stands for all interfaces.
    """
    return interfaces.listen(FIELD, address, CLIENTS)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
