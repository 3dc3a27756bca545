"""`audit` of real runs: healthy ones pass, and every kind of planted fault is found and placed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megatron_stppo.config.file import load
from megatron_stppo.evidence.audit import records as audit_records
from tests.replicas.test_promises import start
from tests.rollout.vllm.tiny import VOCABULARY
from tests.training.loop import small_run

GIVEN = (
    "parallel.tensor=1",
    "rollout.samples_per_task=8",
    "rollout.max_mismatch=1000",
    "update.actor.lr=3e-3",
    "algorithm.preset=kl",
    "run.checkpoint_every=1",
    "run.keep_every=1",
)
Line = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 3 iterations in bfloat16: 32 episodes each, of one turn of up to 8 tokens."""
    config = small_run.write(tmp_path_factory.mktemp("audited"))
    start(["train", str(config), "run.name=whole", "run.iterations=3", "model.dtype=bfloat16", *GIVEN])
    return config.parent / "runs" / "whole"


def copied(run: Path, name: str) -> Path:
    """Return a copy of a run's folder."""
    return shutil.copytree(run, run.with_name(name), dirs_exist_ok=True)


def change(run: Path, iteration: int, edit: Callable[[list[Line]], object]) -> None:
    """Change the lines of an iteration's file."""
    path = run / "trajectories" / f"iteration-{iteration:05d}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_rows(run: Path, edit: Callable[[list[Line]], object]) -> None:
    """Change the rows of metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    edit(rows)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_digests(run: Path) -> None:
    """Remove the digests from the rows, so that only the log-probs are compared."""
    change_rows(run, lambda rows: [row.pop("trajectories/sha256") for row in rows])


def test_an_untouched_run_passes_and_all_its_tokens_are_audited(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(row["rollout/action_tokens"] for row in rows)
    said = start(["audit", str(run)])
    assert f"passed; {tokens} of {tokens} tokens audited" in said
    assert "damaged" not in said and "the 10 worst tokens" in said


def test_a_dump_of_the_engines_tokens_passes_and_one_of_other_weights_does_not(run: Path) -> None:
    rows = []
    for iteration in (1, 3):
        path = run / "trajectories" / f"iteration-{iteration:05d}.jsonl"
        for line in map(json.loads, path.read_text().splitlines()):
            ids, mask = list(line["prompt_ids"]), [0] * len(line["prompt_ids"])
            for turn in line["turns"]:
                ids += turn["token_ids"] + turn["observation_ids"]
                mask += [1] * len(turn["token_ids"]) + [0] * len(turn["observation_ids"])
            logprobs = [x for turn in line["turns"] for x in turn["rollout_logprob"]]
            rows.append({"token_ids": ids, "action_mask": mask, "logprobs": logprobs})
    dump, model = run.parent / "dump.jsonl", str(run.parents[1] / "model")
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows[:32]))
    assert "passed; " in start(["audit-tokens", str(dump), model])
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows[32:]))
    assert "other weights" in start(["audit-tokens", str(dump), model], status=1)


def test_a_log_prob_that_is_off_by_3_nats_and_changed_tokens_are_found_and_placed(run: Path) -> None:
    changed = copied(run, "log-probs")
    without_digests(changed)

    def lower(lines: list[Line]) -> None:
        turn = lines[4]["turns"][0]
        turn["rollout_logprob"][2] -= 3

    def other_tokens(lines: list[Line]) -> None:
        for line in lines[:10]:
            turn = line["turns"][0]
            turn["token_ids"][-1] = (turn["token_ids"][-1] + 7) % 256

    change(changed, 1, lower)
    change(changed, 2, other_tokens)
    said = start(["audit", str(changed)], status=1)
    assert "iteration 1, line 5, turn 1, token 3" in said
    assert said.count("iteration 2, line ") >= 8, "of the 10 worst tokens"
    assert said.splitlines()[-1].startswith("megatron-stppo: FAILED: log-probs differ; ")


def test_versions_that_are_one_too_old_are_found(run: Path) -> None:
    changed = copied(run, "versions")
    without_digests(changed)

    def older(lines: list[Line]) -> None:
        for line in lines:
            for turn in line["turns"]:
                turn["versions"] = [[turn["versions"][0][0] - 1, len(turn["token_ids"])]]

    change(changed, 3, older)
    shutil.rmtree(changed / "checkpoints" / "step_3")  # which no token names
    (changed / "checkpoints" / "LATEST").write_text("step_2")
    said = start(["audit", str(changed)], status=1)
    assert "like version 2" in said


def test_damage_has_an_exit_code_of_its_own_and_one_unreadable_checkpoint_does_not_stop_the_others(
    run: Path,
) -> None:
    changed = copied(run, "checkpoint")
    (changed / "checkpoints" / "step_1" / "state.json").write_text("{}")
    (changed / "checkpoints" / "LATEST").write_text("step_1")  # so that the later steps are abandoned
    said = start(["audit", str(changed)], status=3)
    assert "damaged: version 1 is not audited: " in said and "'state.json' does not match" in said
    assert "versions without a readable checkpoint, whose tokens are not audited: 1-2" in said
    assert "FAILED: damaged records; " in said and "log-probs differ" not in said


def test_a_run_that_was_rolled_back_and_continued_at_another_temperature_passes(run: Path) -> None:
    config = run.parents[1] / "config.yaml"
    continued = copied(run, "continued")
    (continued / "checkpoints" / "LATEST").write_text("step_1")
    given = ("run.name=continued", "run.iterations=2", "model.dtype=bfloat16", *GIVEN)
    start(["train", str(config), "--resume", *given, "rollout.temperature=0.5"])
    rows = [json.loads(line) for line in (continued / "metrics.jsonl").read_text().splitlines()]
    assert [(row["iteration"], row["attempt"]) for row in rows] == [(1, 1), (2, 2)]
    tokens = sum(row["rollout/action_tokens"] for row in rows)
    assert f"passed; {tokens} of {tokens} tokens audited" in start(["audit", str(continued)])


def drop(lines: list[Line]) -> None:
    del lines[3]


def double(lines: list[Line]) -> None:
    lines.insert(3, lines[3])


def swap(lines: list[Line]) -> None:
    lines[3], lines[4] = lines[4], lines[3]


def reward(lines: list[Line]) -> None:
    lines[3]["reward"] = lines[3]["turns"][0]["reward"] = 99.0


def newer(lines: list[Line]) -> None:
    lines[3]["turns"][0]["versions"] = [[2, len(lines[3]["turns"][0]["token_ids"])]]


@pytest.mark.parametrize("edit", [drop, double, swap, reward])
def test_a_changed_file_is_found_by_its_digest(run: Path, edit: Callable[[list[Line]], None]) -> None:
    changed = copied(run, edit.__name__)
    change(changed, 2, edit)
    (damage,) = audit_records.read(load(changed / "config.yaml"), changed, VOCABULARY).damage
    assert "is not the file that was written" in damage


def test_a_token_of_a_version_that_did_not_exist_is_damage_also_without_a_digest(run: Path) -> None:
    changed = copied(run, "newer")
    change(changed, 2, newer)
    without_digests(changed)
    (damage,) = audit_records.read(load(changed / "config.yaml"), changed, VOCABULARY).damage
    assert "line 4: is not a trajectory (turn 1: version 2 did not exist before iteration 3)" in damage


def test_a_file_that_is_missing_or_of_another_iteration_is_damage_and_one_without_a_row_is_left_out(
    run: Path,
) -> None:
    changed = copied(run, "files")
    folder = changed / "trajectories"
    shutil.copy(folder / "iteration-00003.jsonl", folder / "iteration-00002.jsonl")
    shutil.copy(folder / "iteration-00003.jsonl", folder / "iteration-00004.jsonl")
    (folder / "iteration-00001.jsonl").unlink()
    found = audit_records.read(load(changed / "config.yaml"), changed, VOCABULARY)
    first, second = found.damage
    assert first.endswith("iteration-00001.jsonl: cannot be read (No such file or directory)")
    assert "iteration-00002.jsonl line 1: is not a trajectory (iteration=3, in the file of" in second
    assert list(found.notes.values()) == [[4]] and [one.iteration for one in found.played] == [3]


def drop_second(rows: list[Line]) -> None:
    del rows[1]


def drop_last(rows: list[Line]) -> None:
    del rows[2]


def text_as_tokens(rows: list[Line]) -> None:
    rows[1]["rollout/action_tokens"] = "many"


def other_attempt(rows: list[Line]) -> None:
    rows[1]["attempt"] = 7


@pytest.mark.parametrize(
    ("edit", "found", "kept"),
    [
        (drop_second, "metrics.jsonl: has no row of iteration 2", [1, 3]),
        (drop_last, "metrics.jsonl: has no row of iteration 3", [1, 2]),
        (text_as_tokens, "(rollout/action_tokens='many' is not a whole number)", [1, 2, 3]),
        (other_attempt, "configs/attempt-7.yaml: cannot be read", [1, 2, 3]),
    ],
)
def test_a_row_that_is_missing_or_impossible_is_damage(
    run: Path, edit: Callable[[list[Line]], None], found: str, kept: list[int]
) -> None:
    changed = copied(run, edit.__name__)
    change_rows(changed, edit)
    read = audit_records.read(load(changed / "config.yaml"), changed, VOCABULARY)
    (damage,) = read.damage
    assert found in damage and [one.iteration for one in read.played] == kept


def test_without_metrics_the_log_probs_can_be_audited_but_the_run_is_damaged(run: Path) -> None:
    changed = copied(run, "metrics")
    (changed / "metrics.jsonl").unlink()
    read = audit_records.read(load(changed / "config.yaml"), changed, VOCABULARY)
    assert len(read.played) == 3 and "metrics.jsonl: cannot be read" in read.damage[0]


def test_the_iteration_that_was_killed_before_its_row_is_no_damage(run: Path) -> None:
    changed = copied(run, "killed")
    change_rows(changed, drop_last)
    (changed / "checkpoints" / "LATEST").write_text("step_2")
    read = audit_records.read(load(changed / "config.yaml"), changed, VOCABULARY)
    assert not read.damage and list(read.notes.values()) == [[3]]


def test_other_weights_in_model_path_leave_version_0_out(run: Path) -> None:
    changed = copied(run, "other-model")
    other = shutil.copytree(run.parents[1] / "model", run.parents[1] / "other", dirs_exist_ok=True)
    weights = load_file(other / "model.safetensors")
    save_file({n: w * 2 for n, w in weights.items()}, other / "model.safetensors", {"format": "pt"})
    said = start(["audit", str(changed), f"model.path={other}"])
    assert "version 0 needs the weights that the run began with; model.path=" in said
    assert "whose tokens are not audited: 0" in said


def test_a_crash_has_not_the_exit_code_of_a_difference(run: Path) -> None:
    """The state of a checkpoint is a list, and its manifest says so."""
    changed = copied(run, "crash")
    step = changed / "checkpoints" / "step_1"
    (step / "state.json").write_text("[]")
    manifest = json.loads((step / "MANIFEST.json").read_text())
    manifest["files"]["state.json"] = {"sha256": hashlib.sha256(b"[]").hexdigest(), "bytes": 2}
    (step / "MANIFEST.json").write_text(json.dumps(manifest))
    assert "Traceback" in start(["audit", str(changed)], status=70)


def test_iterations_that_may_have_two_temperatures_or_had_top_p_are_left_out(run: Path) -> None:
    """Attempt 1 plays iteration 1, attempt 2 the others. Checkpoints of replicas' runs keep episodes."""
    changed = copied(run, "attempts")
    change_rows(changed, lambda rows: [row.update(attempt=min(row["iteration"], 2)) for row in rows])
    config = load(changed / "config.yaml", ["serving.replicas=1"])
    written = (changed / "configs" / "attempt-1.yaml").read_text()
    for setting, kept in (("temperature: 0.5", [1, 3]), ("top_p: 0.5", [1])):
        second = re.sub(setting.partition(":")[0] + r": 1\.0", setting, written, count=1)
        assert second != written
        (changed / "configs" / "attempt-2.yaml").write_text(second)
        found = audit_records.read(config, changed, VOCABULARY)
        assert [one.iteration for one in found.played] == kept and not found.damage
        assert [n for given in found.notes.values() for n in given] == [n for n in (2, 3) if n not in kept]
    assert found.played[0].config.rollout.temperature == 1.0
    (changed / "configs" / "attempt-1.yaml").write_text(second)
    (changed / "configs" / "attempt-2.yaml").write_text(written)
    found = audit_records.read(config, changed, VOCABULARY)
    assert [one.iteration for one in found.played] == [3], "2 may have episodes that attempt 1 began"


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [3, 8])
def test_runs_of_models_with_sharp_attention_pass(tmp_path: Path, factor: int, dtype: str) -> None:
    config = small_run.write(tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weights[name] *= factor
        elif name.endswith(("proj.weight", "embed_tokens.weight")):
            weights[name] *= 5
    save_file(weights, path, metadata={"format": "pt"})
    start(["train", str(config), "run.iterations=3", f"model.dtype={dtype}", *GIVEN])
    said = start(["audit", str(tmp_path / "runs" / "small")])
    assert "passed; " in said
