"""Translate srun's environment variables to those of torchrun, which torch, megatron and vLLM read.

No command of Slurm is run: the rank and the first rank's address come from the environment alone.
"""

import json
import re
from collections.abc import Mapping

from megatron_stppo.base.errors import ConfigError

# Below the range of ports that Linux uses for outgoing connections.
FIRST_PORT, PORTS = 20_000, 10_000
STEPS_APART = 997  # ports between two steps of a job: rarely those of another job on the node
INTERACTIVE = "4294967290"  # SLURM_STEP_ID of the shell that salloc starts on a node (slurm.h)
LOOPBACK = "127.0.0.1"  # address of the store when all ranks are on one node
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The only variables that a log may contain: the environment also holds secrets.
LOGGED = (
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_RESTART_COUNT", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"),
    *("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    *("SLURMD_NODENAME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "STPPO_OPS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_NVLS_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"),
)


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun that `environment` lacks, computed from those of srun.

    The result is empty under torchrun, and for a process without a launcher. Raises ConfigError for variables
    that are incomplete or contradict each other.

    Example: {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711",
    "SLURM_GTIDS": "8,9,10,11,12,13,14,15", "SLURM_JOB_NODELIST": "gpu[07-08]"} gives rank 9 of 16, the second
    of 8 on its node, with the store at gpu07:24711.
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment or _in_batch_script(environment):
        _check_torchrun(environment)
        return {}
    rank, local, world = (_number(environment, f"SLURM_{x}") for x in ("PROCID", "LOCALID", "NTASKS"))
    if not local <= rank < world:
        raise ConfigError(
            f"SLURM_PROCID={rank} with SLURM_LOCALID={local} and SLURM_NTASKS={world}: no rank has these "
            "numbers; unset them, or start with srun"
        )
    first = first_ranks_host(environment)
    here = environment.get("SLURM_GTIDS", "").split(",")  # the ranks of this node
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or (LOOPBACK if len(here) == world else first),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(environment)),
    }
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        if environment.get(name, variables[name]) != variables[name]:
            raise ConfigError(
                f"{name}={environment[name]}, but srun sets {variables[name]}; unset {name}, which torchrun "
                "sets together with RANK"
            )
    return variables


def check_gpus(environment: Mapping[str, str], seen: bool) -> None:
    """Raise ConfigError if Slurm gave this node's job GPUs and torch does not see one.

    Otherwise the run would train on the CPU, or wait for ranks on other nodes that use NCCL. An empty
    CUDA_VISIBLE_DEVICES, in a shell on such a node, hides the GPUs on purpose.
    """
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    if not seen and gpus not in ("", "0") and environment.get("CUDA_VISIBLE_DEVICES") != "":
        node = environment.get("SLURMD_NODENAME", "this node")
        raise ConfigError(
            f"SLURM_GPUS_ON_NODE={gpus}, but torch sees no GPU on {node}; give the environment for GPUs "
            "(PYTHON=.venv-gpu/bin/python), look at nvidia-smi there, or request no GPUs to train on CPUs"
        )


def first_ranks_host(environment: Mapping[str, str]) -> str:
    """Return the host of this step's first rank, from a list in Slurm's notation. Raises ConfigError.

    Example: {"SLURM_JOB_NODELIST": "gpu[01-08]", "SLURM_STEP_NODELIST": "gpu[07-08]"} gives "gpu07", and the
    list "r[2,4]n[1-8]-ib" gives "r2n1-ib".
    """
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environment else "SLURM_JOB_NODELIST"
    nodes = _given(environment, name)
    first = re.match(r"(?:[^][,]|\[[^][]+\])+(?=,|$)", nodes)
    host = re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0]) if first else ""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise ConfigError(f"{name}={nodes}: is not a list of hosts; set MASTER_ADDR to the first rank's host")
    return host


def is_part_of_the_job(environment: Mapping[str, str]) -> bool:
    """Return whether this is a step on some of its job's nodes. Other steps may run on the others."""
    job, step = (environment.get(f"SLURM_{x}_NUM_NODES", "1") for x in ("JOB", "STEP"))
    return started_by_srun(environment) and job != step


def started_by_srun(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a task of srun, and not the batch script itself."""
    return "SLURM_PROCID" in environment and not _in_batch_script(environment)


def logged_variables(environment: Mapping[str, str]) -> str:
    """Return the variables of LOGGED that are set, as JSON."""
    return json.dumps({name: environment[name] for name in LOGGED if name in environment})


def _in_batch_script(environment: Mapping[str, str]) -> bool:
    """Return whether this process is the batch script itself, or salloc's shell on a node.

    Slurm sets the variables of task 0 there too, but no SLURM_STEP_ID, or that of the interactive step.
    SLURM_NTASKS is then the number of tasks that srun will start.
    """
    return "SLURM_GTIDS" in environment and environment.get("SLURM_STEP_ID") in (None, INTERACTIVE)


def _check_torchrun(environment: Mapping[str, str]) -> None:
    tasks = environment.get("SLURM_NTASKS", "1")
    if "RANK" not in environment and _in_batch_script(environment) and tasks != "1":
        raise ConfigError(
            f"SLURM_NTASKS={tasks}, but this is the batch script itself or salloc's shell; start it with srun"
        )
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return
    first = "RANK" if "RANK" in environment else "WORLD_SIZE"
    for name in TORCHRUN:
        if name not in environment:
            raise ConfigError(
                f"{first}={environment[first]} without {name}; start with torchrun, or unset {first}"
            )
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if rank >= world:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={world}; start with torchrun, or unset both")


def _port(environment: Mapping[str, str]) -> int:
    """Return the port of this step's store. Steps of a job that share a node have different ones."""
    job = _number(environment, "SLURM_JOB_ID")
    step = _number(environment, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environment else 0
    return FIRST_PORT + (job + STEPS_APART * step) % PORTS


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _given(environment, name)
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise ConfigError(f"{name}={text}: is not a whole number; unset it, or start with srun or torchrun")
    return int(text)


def _given(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ConfigError(
            f"{name}: not set or empty, but other variables of a launcher are set; start with srun"
        )
    return environment[name]
