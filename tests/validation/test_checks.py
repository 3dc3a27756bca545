from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megatron_stppo.checkpoint import step_folder
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config_file import load
from megatron_stppo.validation import megatron_fields, serving
from megatron_stppo.validation.checks import check, check_checkpoint, listener_token
from megatron_stppo.validation.megatron_fields import DECIDED, megatron_field_names
from megatron_stppo.validation.run_folder import check_new, check_resume, finished
from megatron_stppo.validation.sources import check_replay, check_source

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 1024,
}


# Of a checkpoint of an asynchronous run, in which 96 groups were trained on and 32 are open.
BOOK = {"tasks": 64, "samples": 1, "first": 96, "next": 128, "trained": {}, "lengths": {}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A configuration whose files exist: 2-way tensor parallel, 64 tasks, 4 minibatches."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("train", "evaluate", "demonstrations"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "run.yaml").write_text(
        f"run: {{root: {tmp_path}/runs, name: r}}\n"
        f"model: {{path: {tmp_path}/model}}\n"
        f"data: {{train: {tmp_path}/train.jsonl, evaluate: {tmp_path}/evaluate.jsonl, "
        f"demonstrations: {tmp_path}/demonstrations.jsonl}}\n"
        f"cold_start: {{output: {tmp_path}/out}}\n"
        "parallel: {tensor: 2}\nrollout: {tasks_per_iteration: 64}\nupdate: {minibatches: 4}\n"
    )
    return tmp_path / "run.yaml"


def refusal(path: Path, overrides: list[str], world: int = 2, command: str = "train") -> str:
    config = load(path, overrides)
    with pytest.raises(ConfigError) as raised:
        check(config, world, command)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


@pytest.mark.parametrize("command", ["train", "evaluate", "cold-start", "convert"])
def test_a_sound_configuration_passes(path: Path, command: str) -> None:
    check(load(path), 2, command)


def test_a_missing_data_file_is_named_with_its_field(path: Path) -> None:
    message = refusal(path, ["data.train=nowhere.jsonl"])
    assert message.startswith("data.train=nowhere.jsonl: no such file;")


def test_an_empty_data_file_is_refused(path: Path) -> None:
    (path.parent / "train.jsonl").write_text("")
    assert "is empty" in refusal(path, [])


def test_a_command_needs_only_the_files_it_reads(path: Path) -> None:
    check(load(path, ["data.train=nowhere.jsonl"]), 2, "evaluate")
    assert "data.evaluate=none.jsonl" in refusal(path, ["data.evaluate=none.jsonl"], command="evaluate")


def test_evaluation_during_training_needs_evaluation_data(path: Path) -> None:
    check(load(path, ["data.evaluate=null"]), 2, "train")
    assert "data.evaluate: missing" in refusal(path, ["data.evaluate=null", "run.evaluate_every=5"])


def test_a_missing_model_folder_is_refused(path: Path) -> None:
    assert refusal(path, ["model.path=nowhere"]).startswith("model.path=nowhere: no such folder;")


def test_an_unknown_tokenizer_is_refused(path: Path) -> None:
    tokenizer = path.parent / "model" / "tokenizer.json"
    tokenizer.write_text('{"model": {"type": "Runes"}}')
    assert "tokenizer.json is not a tokenizer" in refusal(path, [])
    tokenizer.unlink()
    assert "holds no tokenizer.json" in refusal(path, [])


def test_the_layout_must_divide_the_ranks(path: Path) -> None:
    message = refusal(path, ["parallel.pipeline=2"], world=6)
    assert "parallel.tensor=2 * parallel.pipeline=2 must divide the number of ranks 6" in message
    assert "a multiple of 4" in message


def test_the_layout_must_divide_the_model(path: Path) -> None:
    message = refusal(path, ["parallel.tensor=3"], world=3)
    assert message.startswith("parallel.tensor=3 must divide model.num_attention_heads=4; choose 1, 2")


def test_the_engine_must_divide_the_ranks(path: Path) -> None:
    message = refusal(path, ["rollout.engine_tensor=4"])
    assert message == "rollout.engine_tensor=4 must divide the number of ranks 2; choose 1, 2"


def test_tasks_spread_evenly_over_the_engine_replicas(path: Path) -> None:
    overrides = ["rollout.tasks_per_iteration=63", "rollout.engine_tensor=1", "update.minibatches=1"]
    message = refusal(path, overrides)
    assert (
        "rollout.tasks_per_iteration=63 must be a multiple of the 2 engine replicas; choose 62 or 64"
        in message
    )


def test_trajectories_spread_evenly_over_minibatches_and_ranks(path: Path) -> None:
    # 2 replicas of 2 ranks: 60 tasks are even, but 60 trajectories over 8 minibatches x 2 ranks are not.
    message = refusal(path, ["rollout.tasks_per_iteration=60", "update.minibatches=8"], world=4)
    assert "= 60 trajectories must be a multiple of update.minibatches=8 * 2 data-parallel ranks" in message
    assert "choose 48 or 64" in message


def test_expert_parallelism_needs_a_model_with_experts(path: Path) -> None:
    message = refusal(path, ["parallel.tensor=1", "parallel.expert=2"])
    assert message == "parallel.expert=2: the model has no experts; set it to 1"
    for source in ("old_policy", "rollout"):
        message = refusal(path, [f"algorithm.routing_replay={source}"])
        assert message == f"algorithm.routing_replay={source}: the model has no experts; set it to off"


@pytest.mark.parametrize("source", ["old_policy", "rollout"])
def test_a_fused_router_cannot_replay_experts(source: str) -> None:
    given = {
        "model": {"path": "m"},
        "megatron": {"moe_router_fusion": True},
        "algorithm": {"routing_replay": source},
    }
    with pytest.raises(ConfigError) as error:
        megatron_fields.check(Config.model_validate(given))
    assert str(error.value) == (
        "megatron.moe_router_fusion=True: the fused router cannot replay experts "
        f"(algorithm.routing_replay={source}); leave it out, or set algorithm.routing_replay=off"
    )


def test_sequence_parallelism_needs_something_to_split(path: Path) -> None:
    assert "parallel.sequence=true" in refusal(path, ["parallel.tensor=1", "parallel.sequence=true"])


def test_a_typo_in_a_megatron_field_gives_the_nearest_name(path: Path) -> None:
    message = refusal(path, ["megatron.hiden_dropout=0.1"])
    assert message == "megatron.hiden_dropout=0.1: no such field; did you mean megatron.hidden_dropout?"


def test_megatron_fields_come_from_both_of_its_dataclasses() -> None:
    assert {"hidden_dropout", "tensor_model_parallel_size"} <= set(megatron_field_names())


def test_the_context_must_fit_the_model_and_the_tokenizer_needs_a_chat_template(path: Path) -> None:
    assert "max_position_embeddings=32768" in refusal(path, ["rollout.max_context=40000"])
    (path.parent / "model" / "chat_template.jinja").unlink()
    assert "no chat_template" in refusal(path, [])


def test_dropout_and_groups_of_one_are_refused(path: Path) -> None:
    assert "megatron.hidden_dropout=0.1" in refusal(path, ["megatron.hidden_dropout=0.1"])
    message = refusal(path, ["megatron.moe_aux_loss_coeff=0.01"])
    assert message.startswith("megatron.moe_aux_loss_coeff=0.01: megatron multiplies it by the tokens")
    for preset, advantage in (("grpo", "group"), ("mini_rl", "group_mean")):
        message = refusal(path, [f"algorithm.preset={preset}"])
        assert message.startswith("rollout.samples_per_task=1:") and f"advantage={advantage};" in message


def test_a_profile_of_the_rate_has_a_factor_for_each_step_of_an_iteration(path: Path) -> None:
    steps = ["update.epochs=2", "update.minibatches=2", "algorithm.rate=open_loop"]
    message = refusal(path, [*steps, "algorithm.rate_profile=[1, 0.5]"])
    assert message == (
        "algorithm.rate_profile=[1.0, 0.5]: has 2 factors, but an iteration has update.epochs=2 * "
        "update.minibatches=2 = 4 optimizer steps; give 4 factors, or change the number of steps"
    )
    check(load(path, [*steps, "algorithm.rate_profile=[1, 0.5, 0.5, 0]"]), 2, "train")


def test_nucleus_sampling_is_refused_where_log_probs_of_engine_and_trainer_are_compared(path: Path) -> None:
    for setting in ("old_policy=behaviour", "mismatch=truncate"):
        assert refusal(path, ["rollout.top_p=0.9", f"algorithm.{setting}"]) == (
            f"rollout.top_p=0.9: algorithm.{setting} compares the engine's log-probs, which are those of the "
            "tokens that nucleus sampling keeps, with the trainer's; set rollout.top_p=1"
        )
        check(load(path, [f"algorithm.{setting}"]), 2, "train")


def test_resampling_is_refused_where_equal_rewards_are_a_signal_or_a_group_has_one_episode(
    path: Path,
) -> None:
    assert refusal(path, ["rollout.resample=2", "rollout.samples_per_task=4"]) == (
        "rollout.resample=2 with algorithm.advantage=gae: a group of equal rewards has advantages there; set "
        "rollout.resample=0, or a preset with groups such as algorithm.preset=grpo"
    )
    for command in ("train", "rollout"):
        message = refusal(path, ["rollout.resample=2", "algorithm.preset=grpo"], command=command)
        assert message.startswith("rollout.resample=2 with rollout.samples_per_task=1: ")
    grpo = ["rollout.resample=2", "algorithm.preset=grpo", "rollout.samples_per_task=4"]
    check(load(path, grpo), 2, "train")


def test_a_megatron_field_that_follows_from_another_field_is_refused_with_that_field(path: Path) -> None:
    message = refusal(path, ["megatron.calculate_per_token_loss=false"])
    assert message == (
        "megatron.calculate_per_token_loss=False: follows from the losses, which have their own "
        "denominators; leave it out"
    )
    message = refusal(path, ["megatron.context_parallel_size=2"])
    assert message == "megatron.context_parallel_size=2: follows from parallel.context; leave it out"
    message = refusal(path, ["megatron.layernorm_epsilon=1e-5"])
    assert message == (
        "megatron.layernorm_epsilon=1e-05: follows from the architecture, which config.json in model.path "
        "determines; leave it out"
    )
    message = refusal(path, ["megatron.moe_expert_capacity_factor=0"])
    assert message == (
        "megatron.moe_expert_capacity_factor=0: follows from the importance ratios, which need the same "
        "network twice; leave it out"
    )
    assert set(DECIDED) <= set(megatron_field_names())
    check(load(path, ["megatron.recompute_granularity=full"]), 2, "train")


def test_a_critic_starts_from_a_model_of_the_actors_architecture(path: Path) -> None:
    other = path.parent / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": True}))
    check(load(path, [f"model.critic_path={other}"]), 2, "train")
    (other / "config.json").write_text(json.dumps(SHAPE | {"rope_theta": 1e6}))
    message = refusal(path, [f"model.critic_path={other}"])
    assert message.endswith(
        "other: its rope_theta=1000000.0, model.path's is 10000.0; give a checkpoint of the same "
        "architecture, or leave it out"
    )


def test_a_missing_checkpoint_is_refused_with_the_existing_ones(path: Path) -> None:
    config = load(path)
    check_checkpoint(config, None)
    with pytest.raises(ConfigError, match="train first"):
        check_checkpoint(config, "latest")
    (config.run.folder / "checkpoints" / "step_4").mkdir(parents=True)
    check_checkpoint(config, "step_4")
    with pytest.raises(ConfigError, match="step_4"):
        check_checkpoint(config, "step_5")


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
    with pytest.raises(ConfigError, match=f"did you mean run.name={config.run.name}s?"):
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


def write_step(checkpoints: Path, step: int) -> None:
    """Publish a checkpoint that holds nothing but its state."""
    scratch = checkpoints / f"step_{step}.tmp-0"
    scratch.mkdir(parents=True)
    (scratch / "state.json").write_text(json.dumps({"trainers": {"actor": [], "critic": []}}))
    files = {"state.json": step_folder.describe(scratch / "state.json")}
    step_folder.publish(scratch, checkpoints / f"step_{step}", step_folder.Manifest(step, files, "", {}, {}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        (
            {"trainers": {"actor": []}},
            r"algorithm.advantage=gae: trains a critic, .*step_4 holds no critic; set",
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
    state = {"iteration": 4, "trainers": {"actor": [], "critic": []}, "shape": {"hidden": 128}} | changed
    (step / "state.json").write_text(json.dumps(state))
    if not said:
        return check_resume(config)
    with pytest.raises(ConfigError, match=said):
        check_resume(config)


def test_a_run_that_trained_episodes_out_of_their_order_is_not_resumed_colocated(path: Path) -> None:
    config = load(path)
    serving.check_resumed(config, BOOK)
    lengths = {"episodes": 1, "tokens": 8}
    with pytest.raises(ConfigError, match=r"serving\.replicas=null: .* has trained 1 tasks before others"):
        serving.check_resumed(config, BOOK | {"trained": {"99": lengths}})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_listener_needs_no_token(host: str) -> None:
    assert listener_token(host, None) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node7"])
def test_a_listener_that_others_reach_needs_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--token-env"):
        listener_token(host, None)
    monkeypatch.setenv("RETRIEVER_TOKEN", "secret")
    assert listener_token(host, "RETRIEVER_TOKEN") == "secret"


def test_a_token_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="SURELY_NOT_SET"):
        listener_token("127.0.0.1", "SURELY_NOT_SET")


def test_checks_do_not_touch_the_run_folder(path: Path) -> None:
    config: Config = load(path)
    check(config, 2, "train")
    assert not config.run.folder.exists()


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


def test_a_replay_needs_neither_tasks_nor_an_engine_that_fits(path: Path) -> None:
    check(load(path, ["data.train=null", "rollout.engine_tensor=3"]), 2, "replay")
    assert "rollout.engine_tensor=3" in refusal(path, ["rollout.engine_tensor=3"], command="rollout")
