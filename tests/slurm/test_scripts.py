"""The batch scripts handle exit codes correctly, under a fake Slurm with fake ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_stppo.cluster.launch.process import free_port
from megatron_stppo.config.file import load
from megatron_stppo.validation import checks
from tests.plan.test_plans import EXAMPLES, PLANNED
from tests.slurm import cluster

CHECK = cluster.SCRIPTS / "preflight.sbatch"
VERIFY = cluster.SCRIPTS / "verify.sbatch"
BATCH = sorted(set(cluster.SCRIPTS.glob("*.sbatch")) - {CHECK, VERIFY})
SHARED = tuple(cluster.SCRIPTS / f"{name}.sh" for name in ("attempt", "settings", "replicas"))
# {name of the run: GPUs of its plan}
GPUS = {load(EXAMPLES / folder / config).run.name: gpus for folder, config, _, gpus in PLANNED}
ASYNCHRONOUS = "-async"  # ends the names of scripts whose last nodes serve; without it, the name of the plan


def run(folder: Path, *ends: str, arguments: Sequence[str] = (), **variables: str) -> tuple[int, list[str]]:
    """Return (exit code of the job, its lines about the attempts) if attempts end with "CODE STEP"."""
    options = ("--nodes=1", "--ntasks-per-node=1")
    code, said = cluster.run(folder, ends, *options, arguments=arguments, **variables)
    return code, re.findall(r" job \S+: (.*)", said)


def attempts(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "job" / "attempts").glob("4711.*"))


def test_exit_code_85_is_requeued_and_resumed_until_the_run_is_done(tmp_path: Path) -> None:
    code, said = run(tmp_path, "85 3", "85 5", "0 6")
    assert (code, said[1::2]) == (0, ["exit code 85, step 3", "exit code 85, step 5", "exit code 0, step 6"])
    assert attempts(tmp_path) == ["4711.0", "4711.1", "4711.2"]
    assert (tmp_path / "job/attempts/latest").readlink() == Path("4711.2")
    assert [p.name for p in (tmp_path / "job/attempts/4711.1").iterdir()] == ["rank-0.log"]
    arguments = (tmp_path / "ends/arguments").read_text().splitlines()
    assert arguments[0].startswith("-m megatron_stppo train examples/qwen2.5-7b/config.yaml run.name=job ")
    assert [line.endswith(" --resume") for line in arguments] == [False, True, True], (
        "the first begins the run"
    )


@pytest.mark.parametrize("code", [2, 93])
def test_exit_codes_2_and_93_are_not_requeued(tmp_path: Path, code: int) -> None:
    assert run(tmp_path, f"{code} 3")[0] == code
    assert attempts(tmp_path) == ["4711.0"]


@pytest.mark.parametrize("verdict", [2, 93])
def test_the_code_in_exit_json_overrides_the_code_of_a_killed_rank(tmp_path: Path, verdict: int) -> None:
    assert run(tmp_path, "137 3 1", f"137 4 {verdict}")[0] == verdict
    assert attempts(tmp_path) == ["4711.0", "4711.1"]


def test_an_exit_json_of_an_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/exit.json").write_text('{"code": 93, "reason": "of another day"}\n')
    assert run(tmp_path, "1 3", "0 6")[0] == 0


def test_a_folder_that_another_run_uses_is_left_as_it_is(tmp_path: Path) -> None:
    lock, exit_code = tmp_path / "job/lock", tmp_path / "job/exit.json"
    lock.parent.mkdir()
    lock.write_text('{"host": "node7", "process": 4711}\n')
    exit_code.write_text("{}\n")
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.5):
            os.utime(lock)

    threading.Thread(target=renew, daemon=True).start()
    code, said = run(tmp_path / "first", "0 3", ROOT=str(tmp_path))
    ended.set()
    assert code == 2 and said == [
        f'{tmp_path}/job is in use by {{"host": "node7", "process": 4711}}; '
        "wait until it ends, or give another name"
    ]
    assert exit_code.exists() and not attempts(tmp_path)
    assert run(tmp_path / "second", "0 3", ROOT=str(tmp_path))[0] == 0, "the holder was killed"
    assert not exit_code.exists()


def test_the_job_ends_after_two_attempts_without_a_newer_checkpoint(tmp_path: Path) -> None:
    code, said = run(tmp_path, "85 3", "1 3", "137 3", "0 6")
    assert code == 93
    assert said[-1].startswith("not started again: two attempts without a newer checkpoint than step 3")
    assert attempts(tmp_path) == ["4711.0", "4711.1", "4711.2"]


def test_attempts_that_ask_to_be_continued_before_the_first_checkpoint_are_requeued(tmp_path: Path) -> None:
    assert run(tmp_path, "85 0", "85 0", "85 0", "0 6")[0] == 0


def test_a_damaged_latest_does_not_hide_published_steps(tmp_path: Path) -> None:
    checkpoints = tmp_path / "job" / "checkpoints"
    for name in ("step_3", "step_12", "step_15.tmp-0"):
        (checkpoints / name).mkdir(parents=True)
    (checkpoints / "LATEST").write_bytes(b"\0garbage")
    code, said = run(tmp_path, "1 0", "1 0")
    assert code == 93
    assert said[-1].startswith("not started again: two attempts without a newer checkpoint than step 12")


def test_an_attempt_with_progress_resets_the_count(tmp_path: Path) -> None:
    assert run(tmp_path, "1 0", "1 3", "1 3", "85 4", "0 6")[0] == 0


def test_earlier_attempts_do_not_count_after_a_fallback_to_an_older_checkpoint(tmp_path: Path) -> None:
    """The second attempt cannot read the checkpoint of step 10. It continues from 5 and publishes 6."""
    assert run(tmp_path, "1 10", "1 6", "1 8", "1 8", "0 9")[0] == 0


@pytest.mark.parametrize(("killed", "code"), [(9, 0), (10, 93)])
def test_ten_attempts_that_were_killed_from_outside_end_the_job(
    tmp_path: Path, killed: int, code: int
) -> None:
    """A preemption, or the failure of a node, kills this script too: it does not note that they ended."""
    started = tmp_path / "job/attempts/started"
    started.parent.mkdir(parents=True)
    started.write_text("".join(f"4711.{n} 0\n" for n in range(killed)))
    ended, said = run(tmp_path, *["0 6"] * (killed + 1), SLURM_RESTART_COUNT=f"{killed}")
    assert ended == code
    refused = "not started again: ten attempts without a newer checkpoint than step 0 were killed"
    assert said[-1].startswith(refused) == bool(code)


def test_a_name_in_the_arguments_and_a_missing_program_are_refused(tmp_path: Path) -> None:
    code, (line,) = run(tmp_path / "name", "0 6", arguments=("run.name=other",))
    assert code == 2 and line.startswith("run.name=other: the name of the run is that of the job")
    code, (line,) = run(tmp_path / "program", "0 6", PYTHON="/nowhere/python")
    assert code == 2 and line.startswith("PYTHON=/nowhere/python: no such program; make .venv-gpu")


def test_a_newly_submitted_job_starts_a_new_count(tmp_path: Path) -> None:
    started = tmp_path / "job/attempts/started"
    started.parent.mkdir(parents=True)
    started.write_text("4710.0 0\n4710.1 0\n")
    assert run(tmp_path, "1 0", "0 6")[0] == 0


def test_an_image_is_started_with_the_repository_and_the_runs_at_their_own_paths(tmp_path: Path) -> None:
    image, models = tmp_path / "image.sqsh", tmp_path / "models"
    image.touch()
    models.mkdir()
    assert run(tmp_path, "0 6", IMAGE=str(image), MOUNTS=f"{models}:{models}")[0] == 0
    given, mounts, workdir, flags, command = (tmp_path / "slurm/container").read_text().splitlines()
    assert (given, workdir) == (str(image), str(cluster.ROOT))
    assert mounts.split(",") == [f"{path}:{path}" for path in (cluster.ROOT, tmp_path, models)]
    assert flags.split() == ["--container-writable", "--no-container-mount-home", "--no-container-entrypoint"]
    assert command.startswith(f"{cluster.HERE / 'program'} -P -m megatron_stppo train ")


def test_compiled_code_is_kept_beside_the_runs_unless_another_folder_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in a process that compiles
    assert run(tmp_path, "0 6", TRITON_CACHE_DIR="/mine")[0] == 0
    caches = dict(line.split("=") for line in (tmp_path / "ends/caches").read_text().splitlines())
    assert caches == {
        "VLLM_CACHE_ROOT": f"{tmp_path}/.cache/vllm",
        "TRITON_CACHE_DIR": "/mine",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/.cache/inductor",
        "FLASHINFER_WORKSPACE_BASE": f"{tmp_path}/.cache/flashinfer",
    }


def test_a_rank_has_one_thread_unless_the_user_says_otherwise() -> None:
    command = ["bash", "-c", "source examples/slurm/settings.sh && env"]
    for given, threads in (({}, "1"), ({"OMP_NUM_THREADS": "4"}, "4")):
        environment = {"PATH": os.environ["PATH"]} | given
        done = subprocess.run(command, cwd=cluster.ROOT, env=environment, capture_output=True, text=True)
        assert f"OMP_NUM_THREADS={threads}" in done.stdout.splitlines()


def test_the_image_has_the_python_that_the_scripts_start_in_it() -> None:
    settings = (cluster.SCRIPTS / "settings.sh").read_text()
    python = re.findall(r"PYTHON:-(/\S+)}", settings)
    assert python == ["/opt/venv/bin/python"]
    assert "RUN python3.12 -m venv /opt/venv \\\n" in (cluster.ROOT / "Dockerfile").read_text()


def test_without_an_image_no_option_of_a_container_is_given(tmp_path: Path) -> None:
    assert run(tmp_path, "0 6", MOUNTS="/none:/none")[0] == 0
    assert not (tmp_path / "slurm/container").exists()


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.stem)
def test_every_script_requests_the_resources_of_its_plan(script: Path) -> None:
    text = script.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    plan = script.stem.removesuffix(ASYNCHRONOUS)
    serve = {name: int(default) for name, default in re.findall(r"\b(REPLICA\w+)=\$\{\1:-(\d+)}", text)}
    serving = serve["REPLICAS"] * serve["REPLICA_GPUS"] if plan != script.stem else 0
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) == GPUS[plan] + serving
    assert options["gpus-per-node"] == options["ntasks-per-node"]
    assert {"exclusive": "", "mem": "0", "requeue": "", "open-mode": "append"}.items() <= options.items()
    assert options["dependency"] == "singleton", "two jobs of one name would write one folder"
    assert options["signal"] == "USR1@600"
    (config,) = re.findall(r"\S+\.yaml", text)
    assert load(cluster.ROOT / config).run.name == plan
    assert options["job-name"] == script.stem
    assert all(subprocess.run(["bash", "-n", path]).returncode == 0 for path in (script, *SHARED))


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.stem)
def test_arguments_of_every_script_are_overrides_and_win_over_its_own(script: Path, tmp_path: Path) -> None:
    options = ("--job-name=job", "--nodes=1", "--ntasks-per-node=1")
    variables = {"PYTHON": "echo", "ROOT": str(tmp_path), "REPLICAS": "0"}
    given = ("run.seed=7", "run.iterations=2 ")
    with cluster.submit(tmp_path / "slurm", script, *options, arguments=given, **variables) as job:
        job.process.wait(60)
    log = (tmp_path / "job/attempts/latest/rank-0.log").read_text()
    assert log.endswith(" run.seed=7 run.iterations=2 \n"), log


def test_every_plan_has_a_script() -> None:
    colocated = {path.stem for path in BATCH if not path.stem.endswith(ASYNCHRONOUS)}
    assert colocated == set(GPUS) - {"qwen2.5-0.5b", "qwen2.5-72b"}, "one GPU needs none"


@pytest.mark.parametrize(
    "script", [path for path in BATCH if path.stem.endswith(ASYNCHRONOUS)], ids=lambda path: path.stem
)
def test_the_fields_that_an_asynchronous_script_sets_fit_the_model_and_the_ranks(
    script: Path, tmp_path: Path
) -> None:
    options = ("--job-name=job",)
    variables = {"PYTHON": "echo", "ROOT": str(tmp_path), "MODEL": "MODEL"}
    with cluster.submit(tmp_path / "slurm", script, *options, **variables) as job:
        job.process.wait(60)
    log = tmp_path / "job/attempts/latest/rank-0.log"
    _, _, _, path, *overrides = log.read_text().split()
    given = [field for field in overrides if "=" in field and not field.startswith("model.path=")]
    config = load(cluster.ROOT / path, given)
    assert (config.serving.replicas, config.engine_tensor, config.serving.start) == (8, 4, False)
    trains = len(list((tmp_path / "job/attempts/latest").glob("rank-*.log")))
    assert trains == GPUS[script.stem.removesuffix(ASYNCHRONOUS)]
    checks.check(config, trains, "plan")


def test_the_check_of_the_nodes_runs_on_two_ranks_and_the_job_ends_with_its_code(tmp_path: Path) -> None:
    codes = {}
    for name, space in (("enough", "0"), ("too-small", "1e9")):
        limits = ("min_free_space", space), ("min_open_files", "0"), ("min_write", "0"), ("min_read", "0")
        given = ["--size", "1", *(f"--limit={limit}={value}" for limit, value in limits)]
        variables = {"ROOT": str(tmp_path / name), "MASTER_PORT": free_port()}
        options = ("--nodes=1", "--ntasks-per-node=2")
        with cluster.submit(tmp_path / f"slurm-{name}", CHECK, *options, arguments=given, **variables) as job:
            codes[name] = job.process.wait(300)
        assert "--wait=120 --wait=0 " in (job.folder / "steps").read_text(), "srun takes the last one"
        assert "all-reduce within a node" in (job.folder / "job.out").read_text(), (
            "the table is in the job's output"
        )
        written = json.loads((tmp_path / name / "preflight/4711/check.json").read_text())
        assert list(written["ranks"]) == ["0", "1"]
        assert written["passed"] == (codes[name] == 0)
    assert codes == {"enough": 0, "too-small": 2}


def test_verify_runs_on_every_rank_and_the_job_ends_with_its_code(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$@"\nexit 1\n')
    program.chmod(0o755)
    variables = {"ROOT": str(tmp_path), "PYTHON": str(program)}
    options, given = ("--nodes=1", "--ntasks-per-node=2"), ["config.yaml", "model.lora.rank=8"]
    with cluster.submit(tmp_path / "slurm", VERIFY, *options, arguments=given, **variables) as job:
        assert job.process.wait(60) == 1
    written = f"run.root={tmp_path} --json {tmp_path}/verify/4711/verify.json"
    for rank in range(2):
        said = (tmp_path / f"verify/4711/rank-{rank}.log").read_text().strip()
        assert said == f"-m megatron_stppo verify config.yaml model.lora.rank=8 {written}"
    assert said in (job.folder / "job.out").read_text(), "the table is in the job's output"


@pytest.mark.parametrize("script", [CHECK, VERIFY], ids=lambda path: path.stem)
def test_a_check_requests_the_resources_of_a_run(script: Path) -> None:
    wanted = ("ntasks-per-node=8", "gpus-per-node=8", "exclusive", "mem=0")
    lines = script.read_text().splitlines()
    assert {f"#SBATCH --{option}" for option in wanted} <= set(lines) & set(BATCH[0].read_text().splitlines())
