"""Wrong inputs on the command line give exit code 2 and one line with field, value and remedy.

They are all detected before torch is imported. A scheduler would requeue a crash (exit code 1) again and
again.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, models

from megatron_stppo import __main__ as command_line
from megatron_stppo.cli import open_run
from megatron_stppo.config_file import load
from megatron_stppo.environments.retrieval import BM25Retriever
from megatron_stppo.serving import keys
from tests.validation.test_checks import write_step

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}
ROW = {
    "data_source": "test",
    "prompt": [{"role": "user", "content": "Which city?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}},
}
LATIN = '{"id": 1, "contents": "caf\u00e9"}\n'.encode("latin-1")
Said = Callable[..., str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "tasks.jsonl").write_text((json.dumps(ROW) + "\n") * 4)
    BM25Retriever.build([{"id": "1", "contents": "Paris is a city."}], tmp_path / "index")
    config = {
        "run": {"name": "r", "root": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "tasks.jsonl"), "evaluate": str(tmp_path / "tasks.jsonl")},
        "environment": {
            "max_turns": 1,
            "max_observation_tokens": 24,
            "retrieval": {"index": str(tmp_path / "index")},
        },
        "rollout": {"max_turn_tokens": 8, "max_prompt_tokens": 64, "tasks_per_iteration": 4},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Return a function that runs a command, asserts exit code 2 and returns the one line printed."""

    def run(*arguments: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["megatron-stppo", *map(str, arguments)])
        for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)
        code, message = command_line.run(), capsys.readouterr().err
        assert code == 2, message
        assert len(message.splitlines()) == 1 and message.startswith("megatron-stppo: "), message
        return message.removeprefix("megatron-stppo: ").rstrip("\n")

    return run


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("run.seed=-1", "run.seed=-1: Input should be greater than or equal to 0"),
        ("run.seed=4294967296", "run.seed=4294967296: Input should be less than 4294967296"),
        ("update.actor.betas=[1.5,0.9]", "update.actor.betas.0=1.5: Input should be less than 1"),
        (
            "update.critic.betas=[0.9,-0.1]",
            "update.critic.betas.1=-0.1: Input should be greater than or equal to 0",
        ),
        ("rollout.max_context=0", "rollout.max_context=0: Input should be greater than or equal to 2"),
        (
            "rollout.max_context=10",
            "rollout.max_context=10 is less than rollout.max_prompt_tokens=64 + rollout.max_turn_tokens=8; "
            "raise it to 72 or more, or lower these two",
        ),
        (
            "rollout.max_turn_tokens=500",
            "rollout.max_prompt_tokens=64 + (environment.max_turns=1 + 1) * (rollout.max_turn_tokens=500 + "
            "environment.max_observation_tokens=24) = 1112 exceeds the model's max_position_embeddings=256; "
            "lower one of these fields, or set rollout.max_context=256",
        ),
        ("serving.replicas=0", "serving.replicas: 0 is below 1; give null if the trainer's ranks serve"),
        (
            "serving.max_staleness=-1",
            "serving.max_staleness=-1: Input should be greater than or equal to 0",
        ),
        (
            "serving={order: completion, max_staleness: 0}",
            "serving: order='completion' with max_staleness=0: every admitted episode is in the next batch, "
            "so there is only one order; choose 'admission', or max_staleness=1 or more",
        ),
    ],
)
def test_a_number_out_of_its_bounds_is_refused(root: Path, said: Said, override: str, line: str) -> None:
    assert said("train", root / "run.yaml", override) == line


@pytest.mark.parametrize("command", ["train", "rollout", "evaluate"])
@pytest.mark.parametrize("where", ["tasks.jsonl", "tasks.jsonl/deeper"])
def test_a_run_folder_that_cannot_be_written_is_refused(
    root: Path, said: Said, command: str, where: str
) -> None:
    message = said(command, root / "run.yaml", f"run.root={root / where}")
    assert message == (
        f"run.root={root / where}/r: cannot be written, {root}/tasks.jsonl is not a folder; name a folder "
        "that you may write to"
    )


def test_an_output_that_cannot_be_written_is_refused_before_the_evaluation(root: Path, said: Said) -> None:
    message = said("evaluate", root / "run.yaml", "--output", root / "tasks.jsonl" / "result.json")
    assert message.startswith(f"--output={root}/tasks.jsonl: cannot be written, ")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda m: (m / "config.json").write_bytes(b'{"a": "\xe9"}'), "config.json is not JSON in UTF-8"),
        (lambda m: (m / "config.json").write_text("[]"), "config.json holds list, not an object"),
        (lambda m: edit(m, num_hidden_layers=None), "config.json's num_hidden_layers is missing"),
        (
            lambda m: edit(m, hidden_size="64"),
            "config.json's hidden_size is '64', not a whole number above 0",
        ),
        (
            lambda m: edit(m, num_attention_heads=0),
            "config.json's num_attention_heads is 0, not a whole number",
        ),
        (lambda m: edit(m, rms_norm_eps="x"), "config.json's rms_norm_eps is 'x', not above 0"),
        (lambda m: edit(m, rope_scaling="linear"), "config.json's rope_scaling is 'linear', not an object"),
        (lambda m: (m / "tokenizer_config.json").write_text("{"), "tokenizer_config.json: cannot be read"),
        (lambda m: (m / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json: holds list"),
    ],
)
def test_a_model_folder_with_a_broken_file_is_refused(
    root: Path, said: Said, change: Callable[[Path], None], part: str
) -> None:
    change(root / "model")
    assert part in said("train", root / "run.yaml")


def edit(model: Path, **changes: Any) -> None:
    given = {name: value for name, value in (SHAPE | changes).items() if value is not None}
    (model / "config.json").write_text(json.dumps(given))


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_refused(
    root: Path, said: Said, command: str
) -> None:
    remedy = "config.json's vocab_size=1024 allows ids below it; give the tokenizer of this model"
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1024}, unk_token="a"))
    tokenizer.save(str(root / "model" / "tokenizer.json"))
    assert said(command, root / "run.yaml").endswith(f"its tokenizer has the token id 1024, {remedy}")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(root / "model" / "tokenizer.json"))
    added = {"added_tokens_decoder": {"1030": {"content": "<pad>"}}}
    (root / "model" / "tokenizer_config.json").write_text(json.dumps(added))
    assert said(command, root / "run.yaml").endswith(f"its tokenizer has the token id 1030, {remedy}")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"\xff\xfe\x00", "row 1: is not UTF-8 (byte 0xff at position 1); save the file as UTF-8"),
        (json.dumps(ROW).encode() + b"\n" + LATIN, "row 2: is not UTF-8 (byte 0xe9 at position 27)"),
        (b"\xef\xbb\xbf{}\n", "row 1: begins with a byte order mark"),
        (json.dumps(ROW).encode() + b"\n\n", "row 2: is empty; remove the line"),
        (b'{"a": 1,}\n', "row 1: is not JSON (Expecting property name enclosed in double quotes, column 9)"),
        (b'[\n{"a": 1}\n]\n', "row 1: is not JSON (Expecting value, column 2); give one object per line"),
        (b"5\n", "row 1: is int, not an object"),
        (
            json.dumps(ROW | {"prompt": [{"role": "user", "content": "\ud800"}]}).encode(),
            "unpaired surrogate",
        ),
    ],
)
def test_tasks_that_cannot_be_read_are_named_by_their_row(
    root: Path, said: Said, content: bytes, part: str
) -> None:
    (root / "tasks.jsonl").write_bytes(content)
    message = said("train", root / "run.yaml")
    assert message.startswith(f"{root}/tasks.jsonl row ") and part in message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"\xff\xfe\x00\x80", "row 1: is not UTF-8 (byte 0xff at position 1)"),
        (LATIN, "row 1: is not UTF-8 (byte 0xe9 at position 27)"),
        (b'{"id": 1}\n', "row 1: id is missing, or contents are not text; give both"),
        (b'{"id": 1, "contents": "..."}\n', "holds no document; give rows with an id and non-empty contents"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused(root: Path, said: Said, content: bytes, part: str) -> None:
    (root / "corpus.jsonl").write_bytes(content)
    assert part in said("build-index", root / "corpus.jsonl", root / "new")
    assert not (root / "new").exists()


def test_an_index_that_cannot_be_written_is_refused(root: Path, said: Said) -> None:
    (root / "corpus.jsonl").write_text('{"id": 1, "contents": "Paris"}\n')
    message = said("build-index", root / "corpus.jsonl", root / "corpus.jsonl" / "index")
    assert (
        message
        == f"index={root}/corpus.jsonl/index: cannot be written (Not a directory); name another folder"
    )


def test_a_missing_index_names_the_command_that_writes_one(root: Path, said: Said) -> None:
    message = said("train", root / "run.yaml", f"environment.retrieval.index={root}/none")
    assert message == (
        f"environment.retrieval.index={root}/none: no BM25 index there; write one with `megatron-stppo "
        f"build-index CORPUS.jsonl {root}/none`"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run:\n  name: a\n iterations: 3\n", "line 3, column 2: expected <block end>, but found"),
        ("run:\n\tname: a\n", "line 2, column 1: found character '\\t' that cannot start any token"),
        ("run:\n  name: a\n  name: b\n", "line 3, column 3: name appears twice, remove one"),
        ("run: &a {}\nupdate: *a\n", "line 2, column 9: alias *a, write its value out"),
    ],
)
def test_yaml_that_cannot_be_read_is_named_by_its_line(
    root: Path, said: Said, text: str, reason: str
) -> None:
    (root / "run.yaml").write_text(text)
    message = said("train", root / "run.yaml")
    assert message.startswith(f"config={root}/run.yaml: is not YAML ({reason}")
    assert message.endswith("; correct the file")


def test_a_cold_start_replaces_a_model_only(root: Path, said: Said) -> None:
    (root / "scripts.jsonl").write_text("{}\n")
    (root / "photos").mkdir()
    (root / "photos" / "cat.png").write_text("")
    command = ("cold-start", root / "run.yaml", f"data.demonstrations={root}/scripts.jsonl")
    assert "is not a model folder" in said(*command, f"cold_start.output={root}/photos")
    assert "is model.path; name another folder" in said(*command, f"cold_start.output={root}/model")
    assert "is not a folder" in said(*command, f"cold_start.output={root}/tasks.jsonl")


def test_the_retrievers_address_is_announced_only_when_it_listens(root: Path, said: Said) -> None:
    assert said("serve-retriever", root / "none").startswith("environment.retrieval.index=")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = said("serve-retriever", root / "index", "--port", port)
    assert message == (
        f"--host=127.0.0.1 --port={port}: cannot listen on this address (Address already in use); give "
        "another --port, or a --host of this machine"
    )


def test_a_rollout_with_nothing_left_to_play_is_refused(root: Path, said: Said) -> None:
    for step in (3, 4):
        (root / "runs" / "other" / "checkpoints" / f"step_{step}").mkdir(parents=True)
    command = ("rollout", root / "run.yaml", "--from", root / "runs" / "other")
    assert said(*command, "run.iterations=4").startswith(
        f"run.iterations=4: --start=latest of {root}/runs/other has finished 4 iterations, so nothing is "
        "left to play; give run.iterations=5 or more"
    )
    assert "--start=step_3" in said(*command, "--start", "step_3", "run.iterations=2")


def test_a_run_in_progress_is_not_trained_by_a_second_process(root: Path, said: Said) -> None:
    folder = root / "runs" / "r"
    folder.mkdir(parents=True)
    code = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX)"
    command = [sys.executable, "-c", f"{code}; print(flush=True); sys.stdin.read()", str(folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        message = said("train", root / "run.yaml", "serving.replicas=1")
    assert message == (
        f"run.name=r: {folder} is in use by another process; wait until it ends, or give another run.name"
    )


def test_a_finished_run_is_resumed_without_starting_anything(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = root / "runs" / "r"
    write_step(folder / "checkpoints", 4)
    left_by_a_killed_trainer = keys.path_of(folder)
    left_by_a_killed_trainer.parent.mkdir()
    left_by_a_killed_trainer.touch()
    arguments = ("train", str(root / "run.yaml"), "--resume", "run.iterations=4", "serving.replicas=1")
    monkeypatch.setattr(sys, "argv", ["megatron-stppo", *arguments])
    assert command_line.run() == 0
    assert json.loads((folder / "exit.json").read_text()) == {"code": 0, "reason": "done"}
    said = capsys.readouterr().err
    assert "megatron-stppo: run.iterations=4: step_4 is done; give more to continue the run\n" in said
    assert "importing" not in said and not list((folder / "serving").iterdir())


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("192.0.2.1", "cannot listen on 192.0.2.1 (Cannot assign requested address); give the address of a"),
        ("0.0.0.0", "means every interface of this machine; give the address of the one that replicas"),
    ],
)
def test_an_address_for_replicas_that_is_not_one_of_this_machine_is_refused(
    root: Path, said: Said, address: str, why: str
) -> None:
    message = said("train", root / "run.yaml", "serving.replicas=1", f"serving.address={address}")
    assert message.startswith(f"serving.address={address}: {why}")
    assert not (root / "runs").exists()


@pytest.fixture
def recorded(root: Path) -> Path:
    """The folder of an asynchronous run of one replica, as far as a repetition reads it first."""
    run = root / "runs" / "first"
    (run / "serving" / "journal").mkdir(parents=True)
    (run / "configs").mkdir()
    (run / "configs" / "attempt-1.yaml").touch()
    (run / "config.yaml").write_text((root / "run.yaml").read_text() + "serving: {replicas: 1}\n")
    line = {"step": 0, "assigned": [0, 1], "answers": [], "version": 0, "hold": False}
    write_lines(run / "serving" / "journal" / "replica-0.jsonl", json.dumps(line))
    write_lines(run / "serving" / "batches.jsonl", '{"iteration": 0, "groups": [0]}')
    return run


def write_lines(path: Path, *lines: str) -> None:
    path.write_text("".join(line + "\n" for line in lines))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda run: write_lines(
                run / "config.yaml", *(run / "config.yaml").read_text().splitlines()[:-1]
            ),
            "RUN_DIR={run}: serving.replicas=null: the run was colocated and has no journal; give an "
            "asynchronous run, or replay --records rollouts",
        ),
        (
            lambda run: (run / "configs" / "attempt-2.yaml").touch(),
            "RUN_DIR={run}: was resumed, so its journal is not complete; give another run",
        ),
        (
            lambda run: (run / "serving" / "journal" / "replica-0.jsonl").unlink(),
            "RUN_DIR={run}: has no serving/journal; give an asynchronous run",
        ),
        (
            lambda run: write_lines(run / "serving" / "journal" / "replica-0.jsonl", '{"step": 1}'),
            "{run}/serving/journal/replica-0.jsonl: line 1 is not a journal's (Object missing required "
            "field `assigned`); give the journal as it was written",
        ),
        (
            lambda run: write_lines(
                run / "serving" / "journal" / "replica-1.jsonl",
                '{"step": 3, "assigned": [1], "answers": [], "version": null}',
            ),
            "RUN_DIR={run}: replica-0 and replica-1 have both played episode 1, so a replica was lost, at a "
            "moment that is not recorded; give another run",
        ),
        (
            lambda run: write_lines(run / "serving" / "batches.jsonl", '{"iteration": 0}'),
            "{run}/serving/batches.jsonl: line 1 is not a batch's ('groups'); give the record as it was "
            "written",
        ),
        (
            lambda run: (run / "serving" / "batches.jsonl").unlink(),
            "{run}/serving/batches.jsonl: cannot be read (No such file or directory); give the folder of an "
            "asynchronous run",
        ),
    ],
    ids=["colocated", "resumed", "no journal", "damaged", "lost", "damaged batches", "no batches"],
)
def test_a_journal_that_cannot_repeat_a_run_is_refused(
    root: Path, said: Said, recorded: Path, change: Callable[[Path], None], line: str
) -> None:
    change(recorded)
    message = said("replay", recorded, "--records", "journal", "run.name=again")
    assert message == line.replace("{run}", str(recorded))
    assert not (root / "runs" / "again").exists()


def test_a_repetition_has_another_folder_than_the_recorded_run(said: Said, recorded: Path) -> None:
    (recorded / "metrics.jsonl").write_text("{}\n")
    message = said("replay", recorded, "--records", "journal", "run.name=first")
    assert message == f"run.name=first: {recorded} holds metrics.jsonl; give another run.name"


def test_a_journal_is_repeated_from_its_beginning(said: Said, recorded: Path) -> None:
    message = said("replay", recorded, "--records", "journal", "run.name=again", "--start", "step_3")
    assert message == "--start=step_3: a journal is repeated from its beginning; remove --start"


def test_log_probs_of_nucleus_sampling_are_not_audited(said: Said, recorded: Path) -> None:
    (recorded / "trajectories").mkdir()
    assert said("audit", recorded).endswith("trajectories/ holds no iteration to audit; choose another run")
    (recorded / "trajectories" / "iteration-00001.jsonl").touch()
    config = (recorded / "config.yaml").read_text().replace("rollout:\n", "rollout:\n  top_p: 0.5\n")
    (recorded / "config.yaml").write_text(config)
    assert said("audit", recorded).startswith("rollout.top_p=0.5: the engine's log-probs are of the tokens")


def test_fewer_tasks_than_an_iteration_needs_give_a_warning(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    open_run._read_tasks(load(root / "run.yaml"), ("train",))
    assert capsys.readouterr().err == (
        f"megatron-stppo: data.train={root}/tasks.jsonl: holds 1 tasks, fewer than "
        "rollout.tasks_per_iteration=4: every iteration plays a task several times; add tasks, or set "
        "rollout.tasks_per_iteration=1 and more samples_per_task\n"
    )
    open_run._read_tasks(load(root / "run.yaml", ["rollout.tasks_per_iteration=1"]), ("train",))
    assert capsys.readouterr().err == ""


def test_under_torchrun_the_reason_is_the_last_thing_printed(root: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "megatron_stppo", "train", str(root / "run.yaml"), "update.epoch=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    last = [line for line in done.stderr.splitlines() if line.strip()][-2:]
    assert "megatron-stppo: update.epoch=2: no such field; did you mean update.epochs?" in last[0]
    assert not last[1].strip("="), "the frame of torchrun's report"
