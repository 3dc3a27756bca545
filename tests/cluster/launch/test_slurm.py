from __future__ import annotations

import json

import pytest

from megatron_stppo.cluster.launch.slurm import (
    check_gpus,
    first_ranks_host,
    logged_variables,
    started_by_srun,
    torchrun_variables,
)
from megatron_stppo.config import ConfigError

TASK = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_GTIDS": "8,9,10,11,12,13,14,15",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURM_JOB_ID": "4711"}
INTERACTIVE = BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TASK.items() if name not in names}


def test_a_task_finds_its_rank_and_the_first_host_of_its_step() -> None:
    assert torchrun_variables(TASK) == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "24711",
    }


def test_tasks_of_a_single_node_meet_on_its_loopback() -> None:
    found = torchrun_variables(TASK | {"SLURM_PROCID": "1", "SLURM_NTASKS": "8"})
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("8", "8", "127.0.0.1")


def test_without_a_step_the_first_host_of_the_job_is_used() -> None:
    task = without("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_GTIDS")
    assert torchrun_variables(task)["MASTER_ADDR"] == "gpu01"


def test_the_port_is_below_the_ports_of_outgoing_connections() -> None:
    jobs = [TASK | {"SLURM_JOB_ID": job} for job in ("1", "67108863")]
    assert [torchrun_variables(job)["MASTER_PORT"] for job in jobs] == ["20001", "28863"]


def test_steps_of_a_job_have_different_ports() -> None:
    ports = {torchrun_variables(TASK | {"SLURM_STEP_ID": str(step)})["MASTER_PORT"] for step in range(1000)}
    assert len(ports) == 1000
    assert torchrun_variables(TASK | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] == "25708"  # 24711 + 997


def test_variables_set_by_torchrun_or_the_user_are_kept() -> None:
    assert torchrun_variables(TASK | TORCHRUN) == {}
    found = torchrun_variables(TASK | {"MASTER_ADDR": "ib0", "MASTER_PORT": "29500"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("ib0", "29500")


@pytest.mark.parametrize(
    "alone",
    [
        {},
        BATCH_SCRIPT,
        BATCH_SCRIPT | {"SLURM_NTASKS": "1"},
        INTERACTIVE | {"SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "8"},
    ],
)
def test_a_process_without_a_launcher_stays_a_single_rank(alone: dict[str, str]) -> None:
    assert torchrun_variables(alone) == {}
    assert not started_by_srun(alone)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("localhost", "localhost"),
        ("login,gpu1", "login"),
        ("gpu[007-012,020],login", "gpu007"),
        ("gpu[3,5-7]", "gpu3"),
        ("r[2,4]n[1-8]-ib,x", "r2n1-ib"),
        ("c-1.example.org,c-2.example.org", "c-1.example.org"),
    ],
)
def test_the_first_host_of_a_list_is_read(nodes: str, host: str) -> None:
    assert first_ranks_host({"SLURM_JOB_NODELIST": nodes}) == host


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (without("SLURM_NTASKS"), "SLURM_NTASKS: not set"),
        (without("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST: not set"),
        (TASK | {"SLURM_LOCALID": ""}, "SLURM_LOCALID: not set or empty"),
        (TASK | {"SLURM_PROCID": "-1"}, "SLURM_PROCID=-1: is not a whole number"),
        (TASK | {"SLURM_NTASKS": "8"}, "SLURM_PROCID=9 with SLURM_LOCALID=1 and SLURM_NTASKS=8"),
        (TASK | {"SLURM_STEP_NODELIST": "gpu[07-08"}, r"SLURM_STEP_NODELIST=gpu\[07-08: is not a list"),
        (TASK | {"SLURM_STEP_NODELIST": "$(id)"}, "is not a list of hosts"),
        (TASK | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8, but srun sets 16; unset WORLD_SIZE"),
        (BATCH_SCRIPT | {"SLURM_NTASKS": "64"}, "SLURM_NTASKS=64, but this is the batch script itself"),
        (
            INTERACTIVE | {"SLURM_NTASKS": "8"},
            "SLURM_NTASKS=8, but this is .* or salloc's shell; start it with",
        ),
        ({"RANK": "0"}, "RANK=0 without WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 must be below WORLD_SIZE=4"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE=four: is not a whole number"),
    ],
)
def test_wrong_or_incomplete_variables_give_one_line(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        torchrun_variables(environment)
    assert "\n" not in str(error.value)


def test_only_listed_variables_are_logged() -> None:
    logged = json.loads(logged_variables(TASK | {"API_KEY": "s3cret", "SLURM_JWT": "s3cret"}))
    assert logged == without("SLURM_STEP_ID", "SLURM_GTIDS")


def test_gpus_that_slurm_gave_and_torch_does_not_see_are_an_error_unless_they_are_hidden_on_purpose() -> None:
    given = {"SLURM_GPUS_ON_NODE": "8", "SLURMD_NODENAME": "gpu07", "CUDA_VISIBLE_DEVICES": "0,1"}
    with pytest.raises(
        ConfigError, match="SLURM_GPUS_ON_NODE=8, but torch sees no GPU on gpu07; give the env"
    ):
        check_gpus(given, seen=False)
    check_gpus(given, seen=True)
    check_gpus(given | {"CUDA_VISIBLE_DEVICES": ""}, seen=False)
    check_gpus({}, seen=False)
