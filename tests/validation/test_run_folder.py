"""What a run needs of the folders of other runs and of its own: a checkpoint to resume, records to replay."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megatron_stppo.checkpoint import step_folder
from megatron_stppo.commands.open_run import open_config
from megatron_stppo.config import ConfigError
from megatron_stppo.config.file import load
from megatron_stppo.data.text.tokenizer_files import digests
from megatron_stppo.validation import attempts
from megatron_stppo.validation.run_folder import (
    check_audit,
    check_left,
    check_new,
    check_pretraining,
    check_replay,
    check_resume,
    check_resumed,
    check_source,
    check_step,
    check_tokens,
    finished,
    with_own_model,
)
from tests.validation.conftest import SHAPE

# Of a checkpoint of an asynchronous run, in which 96 groups were trained on and 32 are open.
BOOK = {"tasks": 64, "samples": 1, "first": 96, "next": 128, "trained": {}, "lengths": {}}


def test_a_missing_checkpoint_is_refused_with_the_existing_ones(path: Path) -> None:
    config = load(path)
    check_step(config, config.run.folder, "checkpoint", None)
    with pytest.raises(ConfigError, match="train first"):
        check_step(config, config.run.folder, "checkpoint", "latest")
    (config.run.folder / "checkpoints" / "step_4").mkdir(parents=True)
    check_step(config, config.run.folder, "checkpoint", "step_4")
    with pytest.raises(ConfigError, match="step_4"):
        check_step(config, config.run.folder, "checkpoint", "step_5")


@pytest.mark.parametrize(
    "record", ["metrics.jsonl", "trajectories/iteration-00001.jsonl", "checkpoints/step_1/x"]
)
def test_a_new_run_is_refused_in_a_folder_that_holds_a_run(path: Path, record: str) -> None:
    config = load(path)
    check_new(config)
    file = config.run.folder / record
    file.parent.mkdir(parents=True)
    file.touch()
    (config.run.folder / "config.yaml").touch()
    if record == "metrics.jsonl":
        check_new(config)  # an attempt that ended before its first row has nothing to lose
        file.write_text("{}\n")
    with pytest.raises(ConfigError, match=f"holds {record.partition('/')[0]}; give another run.name"):
        check_new(config)


def test_only_an_existing_run_is_resumed(path: Path) -> None:
    config = load(path)
    with pytest.raises(ConfigError, match="holds no run; to start one, leave --resume out"):
        check_resume(config)
    right = config.run.root / f"{config.run.name}s" / "config.yaml"
    right.parent.mkdir(parents=True)
    right.touch()
    with pytest.raises(
        ConfigError,
        match=rf"did you mean run.name={config.run.name}s\? To start a new run, leave --resume out$",
    ):
        check_resume(config)
    config.run.folder.mkdir()
    with pytest.raises(ConfigError, match="holds no run"):
        check_resume(config)
    (config.run.folder / "checkpoints").mkdir()  # what convert to-megatron writes
    check_resume(config)


def test_a_run_is_finished_when_the_last_iteration_has_a_complete_checkpoint(path: Path) -> None:
    assert finished(load(path)) is None, "a new run"
    checkpoints = load(path).run.folder / "checkpoints"
    write_step(checkpoints, 4)
    last, more = load(path, ["run.iterations=4"]), load(path, ["run.iterations=5"])
    assert (finished(last), finished(more)) == (4, None)
    (checkpoints / "step_4" / "state.json").unlink()
    assert finished(last) is None, "it is resumed from an earlier one"


def test_a_run_whose_last_evaluation_failed_is_finished_when_it_was_repeated(path: Path) -> None:
    run = load(path).run.folder
    write_step(run / "checkpoints", 4, owed={"iteration": 4})
    last = load(path, ["run.iterations=4", "run.evaluate_every=2"])
    assert finished(last) is None, "there are no metrics"
    (run / "metrics.jsonl").write_text('{"iteration": 2, "evaluate/exact_match": 1}\n{"iteration": 4}\n')
    assert finished(last) is None
    assert finished(load(path, ["run.iterations=4", "run.evaluate_every=0"])) == 4, (
        "evaluations were given up"
    )
    (run / "metrics.jsonl").write_text('{"iteration": 4, "evaluate/exact_match": 1}\n')
    assert finished(last) == 4


def write_step(checkpoints: Path, step: int, **state: object) -> None:
    """Publish a checkpoint that holds nothing but its state."""
    scratch = checkpoints / f"step_{step}.tmp-0"
    scratch.mkdir(parents=True)
    (scratch / "state.json").write_text(json.dumps({"trainers": {"actor": [], "critic": []}} | state))
    files = {"state.json": step_folder.describe(scratch / "state.json")}
    step_folder.publish(scratch, checkpoints / f"step_{step}", step_folder.Manifest(step, files, "", {}, {}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        (
            {"trainers": {"actor": []}},
            r"algorithm.advantage=gae: trains a critic, the newest .* holds no critic; set",
        ),
        (
            {"shape": {"hidden": 64, "max_positions": 1}},
            r"model.path=.*: its hidden=128, that of .*step_4 is 64; give",
        ),
        ({"shape": {"max_positions": 1}}, ""),
        ({"trainers": "damaged"}, ""),
        ({"ledger": BOOK}, ""),
        (
            {"ledger": BOOK | {"tasks": 4}},
            "rollout.tasks_per_iteration=64: the checkpoint has admitted groups of a run with 4; resume with "
            "rollout.tasks_per_iteration=4",
        ),
        (
            {"ledger": BOOK | {"samples": 3}},
            "rollout.samples_per_task=1: .*; resume with .*samples_per_task=3",
        ),
        ({"ledger": BOOK | {"tasks": 4, "first": 128}}, ""),  # no group is open
    ],
)
def test_a_run_is_resumed_with_the_models_and_the_episodes_that_it_has(
    path: Path, changed: dict[str, object], said: str
) -> None:
    config = load(path, ["serving.replicas=1"])
    step = config.run.folder / "checkpoints" / "step_4"
    step.mkdir(parents=True)
    (step.parent / "LATEST").write_text("step_4")
    state = {"trainers": {"actor": [], "critic": []}, "shape": {"hidden": 128}, "tokenizer": {}}
    (step / "state.json").write_text(json.dumps(state | {"iteration": 4} | changed))
    if not said:
        return check_resume(config)
    with pytest.raises(ConfigError, match=said):
        check_resume(config)


def test_weights_of_a_run_are_not_combined_with_another_tokenizer_or_template(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    config, changed = load(path), load(path, [f"model.path={other}"])
    run = config.run.folder
    write_step(run / "checkpoints", 3, shape={}, tokenizer=digests(model) | {"tokenizer": "0"})
    write_step(run / "checkpoints", 4, shape={"vocab": 1024}, tokenizer=digests(model))
    with pytest.raises(ConfigError, match=r"its tokenizer differs from that of .*step_3;"):
        check_step(config, run, "checkpoint", "step_3")
    attempts.record(config, 0)
    (run / "trajectories" / "iteration-1").mkdir(parents=True)
    checks = (
        partial(check_audit, changed, run),
        partial(check_step, changed, run, "checkpoint", "latest"),
        partial(check_step, changed, run, "checkpoint", "step_4"),
        partial(check_resume, changed),
    )
    for name, text, said in (
        ("README.md", "", ""),
        ("tokenizer_config.json", '{"is_local": true, "model_max_length": 2048}', ""),
        ("tokenizer_config.json", '{"chat_template": "not read beside chat_template.jinja"}', ""),
        ("tokenizer_config.json", '{"add_bos_token": true}', "tokenizer differs"),
        ("chat_template.jinja", "{{ messages[0] }}", "chat template differs"),
        ("tokenizer.json", '{"version": "2"}', "tokenizer differs"),
        ("generation_config.json", '{"eos_token_id": 1}', "end-of-text ids differs"),
        ("config.json", json.dumps(SHAPE | {"vocab_size": 1088}), "vocab=1088"),
    ):
        shutil.copytree(model, other)
        (other / name).write_text(text)
        for check in checks:
            if not said:
                check()
                continue
            with pytest.raises(ConfigError, match=f"its {said}.*step_4.*; give the run's model, .*={model}"):
                check()
        shutil.rmtree(other)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"its tokenizer differs .*; restore the files of the run's model"):
        check_resume(config)
    assert not capsys.readouterr().err


def test_a_runs_checkpoints_and_records_belong_to_the_model_that_it_had(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, other = load(path), tmp_path / "other"
    given = [f"model.path={other}"]
    changed, run = load(path, given), config.run.folder
    assert with_own_model(changed, []) is changed, "there is no run"
    check_tokens(changed, "RUN_DIR", run)
    attempts.record(config, 0)
    assert with_own_model(changed, []).model.path == tmp_path / "model"
    assert f"model.path={tmp_path}/model, that of the run in {run}, not {other}" in capsys.readouterr().err
    assert with_own_model(changed, given) is changed
    assert with_own_model(config, []) is config
    (asked := path.with_name("other.yaml")).write_text(dumped := changed.dump())
    assert str(other) in dumped
    assert open_config(asked, [], "convert", world=2, checkpoint=True).model.path == tmp_path / "model"
    shutil.copytree(tmp_path / "model", other)
    (other / "chat_template.jinja").write_text("{{ messages[0] }}")  # records have token ids
    check_tokens(changed, "RUN_DIR", run)
    Tokenizer(models.BPE({"a": 1, " ": 0}, [])).save(str(other / "tokenizer.json"))
    (run / "trajectories" / "iteration-1").mkdir(parents=True)
    new = load(path, [*given, "run.name=new"])
    for check, field in (
        (partial(check_replay, new, "rollouts", run, None), "RUN_DIR"),
        (partial(check_audit, new, run), "RUN_DIR"),
        (partial(check_pretraining, new, run), "--critic"),
    ):
        with pytest.raises(ConfigError, match=f"other: its tokenizer gives 2 of {field}={run}'s 2 tokens"):
            check()
    (tmp_path / "model").rename(tmp_path / "moved")
    assert with_own_model(changed, []) is changed


def test_a_run_that_trained_episodes_out_of_their_order_is_not_resumed_colocated(path: Path) -> None:
    config = load(path)
    check_resumed(config, BOOK)
    lengths = {"episodes": 1, "tokens": 8}
    with pytest.raises(ConfigError, match=r"serving\.replicas=null: .* has trained 1 tasks before others"):
        check_resumed(config, BOOK | {"trained": {"99": lengths}})


def test_a_replay_needs_records_of_another_run_and_a_new_folder(path: Path, tmp_path: Path) -> None:
    config, other = load(path), tmp_path / "runs" / "other"

    def said(what: str, source: Path, start: str | None = None) -> str:
        with pytest.raises(ConfigError) as raised:
            check_replay(config, what, source, start)
        assert len(str(raised.value).splitlines()) == 1
        return str(raised.value)

    assert "no such folder" in said("rollouts", other)
    (other / "trajectories").mkdir(parents=True)
    assert "trajectories/ holds no iteration" in said("rollouts", other)
    (other / "trajectories" / "iteration-00001.jsonl").touch()
    check_replay(config, "rollouts", other, None)
    replaying = load(path, ["algorithm.routing_replay=rollout"])
    with pytest.raises(ConfigError, match="trajectories/ does not contain the experts"):
        check_replay(replaying, "rollouts", other, None)
    assert "run.dump=faults or all" in said("batches", other)
    assert "--start=step_3: not in" in said("rollouts", other, "step_3")
    (other / "checkpoints" / "step_3").mkdir(parents=True)
    check_source(config, "--from", other, "step_3")
    config.run.folder.joinpath("trajectories/iteration-00001.jsonl").mkdir(parents=True)
    assert "holds trajectories; give another run.name" in said("rollouts", other)


def test_what_is_left_is_counted_from_the_checkpoint_that_is_loaded(path: Path, tmp_path: Path) -> None:
    config, folder = load(path, ["run.iterations=5"]), tmp_path / "checkpoints"
    for name in ("step_3", "step_5", "step_6.tmp-0"):
        (folder / name).mkdir(parents=True)
    check_left(config, tmp_path, "step_3")
    for start in ("latest", "step_5"):
        with pytest.raises(ConfigError, match=rf"--start={start} of .* has finished 5 iterations"):
            check_left(config, tmp_path, start)
    (folder / "LATEST").write_text("step_3")
    check_left(config, tmp_path, "latest")
