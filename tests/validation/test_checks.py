from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import load
from megatron_stppo.config.section import enforce
from megatron_stppo.training.update.own import Own
from megatron_stppo.validation import passed_on
from megatron_stppo.validation.checks import _steps, check
from megatron_stppo.validation.passed_on import (
    DECIDED_MEGATRON,
    DECIDED_VLLM,
    ENGINE_ARGS,
    TRANSFORMER_CONFIG,
    declared,
)


def refusal(path: Path, overrides: list[str], world: int = 2, command: str = "train") -> str:
    config = load(path, overrides).beside(path.parent)
    with pytest.raises(ConfigError) as raised:
        check(config, world, command)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


@pytest.mark.parametrize("command", ["train", "evaluate", "cold-start", "convert"])
def test_a_sound_configuration_passes(path: Path, command: str) -> None:
    check(load(path), 2, command)


REFUSED = [  # overrides, and how the line begins
    ("data.train=nowhere.jsonl", "data.train=nowhere.jsonl: no such file;"),
    ("model.path=nowhere", "model.path=nowhere: no such folder;"),
    ("parallel.tensor=1 parallel.sequence=true", "parallel.sequence=true: there is nothing to split"),
    (
        "rollout.tasks_per_iteration=63 rollout.engine_tensor=1 update.minibatches=1",
        "rollout.tasks_per_iteration=63 must be a multiple of the 2 engine replicas; choose 62 or 64",
    ),
    ("parallel.tensor=1 parallel.expert=2", "parallel.expert=2: the model has no experts; set it to 1"),
    *(
        (
            f"algorithm.routing_replay={x}",
            f"algorithm.routing_replay={x}: the model has no experts; set it to",
        )
        for x in ("old_policy", "rollout")
    ),
    *(
        (
            f"algorithm.preset={preset}",
            "rollout.samples_per_task=1: a group of one has no learning signal with algorithm.advantage="
            f"{advantage};",
        )
        for preset, advantage in (("grpo", "group"), ("mini_rl", "group_mean"), ("gigpo", "gigpo"))
    ),
    ("megatron.hidden_dropout=0.1", "megatron.hidden_dropout=0.1: importance ratios need the same network"),
    ("megatron.moe_aux_loss_coeff=0.01", "megatron.moe_aux_loss_coeff=0.01: megatron multiplies it by"),
    ("megatron.moe_permute_fusion=true", "megatron.moe_permute_fusion=True: model/experts.py"),
    (
        "megatron.moe_token_dispatcher_type=flex",
        "megatron.moe_token_dispatcher_type=flex: follows from the order of the experts' tokens",
    ),
    (
        "megatron.hiden_dropout=0.1",
        "megatron.hiden_dropout=0.1: no such field; did you mean megatron.hidden_dropout?",
    ),
    (
        "megatron.bias_activation_fusion=3",
        "megatron.bias_activation_fusion=3: megatron's TransformerConfig declares bool; give one of these",
    ),
    (
        "megatron.calculate_per_token_loss=false",
        "megatron.calculate_per_token_loss=False: follows from the losses, which have their own denominators",
    ),
    (
        "megatron.context_parallel_size=2",
        "megatron.context_parallel_size=2: follows from parallel.context; leave it out",
    ),
    (
        "megatron.layernorm_epsilon=1e-5",
        "megatron.layernorm_epsilon=1e-05: follows from the architecture, which config.json in model.path",
    ),
    (
        "megatron.moe_expert_capacity_factor=0",
        "megatron.moe_expert_capacity_factor=0: follows from the importance ratios, which need the same net",
    ),
    (
        "rollout.vllm.max_num_batched_token=4096",
        "rollout.vllm.max_num_batched_token=4096: no such field; did you mean "
        "rollout.vllm.max_num_batched_tokens?",
    ),
    (
        "rollout.vllm.max_num_seqs=8",
        "rollout.vllm.max_num_seqs=8: follows from rollout.max_sequences; leave it out",
    ),
    (
        "rollout.vllm.enable_prefix_caching=1",
        "rollout.vllm.enable_prefix_caching=1: vLLM's EngineArgs declares bool | None; give one of these",
    ),
]


@pytest.mark.parametrize(("given", "line"), REFUSED)
def test_what_cannot_be_trained_is_refused_in_a_line_with_field_value_and_remedy(
    path: Path, given: str, line: str
) -> None:
    assert refusal(path, given.split()).startswith(line)


def test_options_that_are_passed_on_are_those_of_the_installed_packages(path: Path) -> None:
    fields = declared(*TRANSFORMER_CONFIG)
    assert {"hidden_dropout", "tensor_model_parallel_size"} <= set(fields), "of both dataclasses"
    assert set(DECIDED_MEGATRON) <= set(fields)
    assert set(DECIDED_VLLM) <= set(declared(*ENGINE_ARGS))
    setup = Path(passed_on.__file__).parents[1] / "rollout/vllm/vllm_setup.py"
    nodes = ast.walk(ast.parse(setup.read_text(encoding="utf-8")))
    assigned = [node for node in nodes if isinstance(node, ast.AnnAssign)]
    (fixed,) = (node.value for node in assigned if ast.unparse(node.target) == "fixed")
    assert set(ast.literal_eval(ast.unparse(ast.List(fixed.keys)))) <= set(DECIDED_VLLM)  # type: ignore
    fitting = ["megatron.recompute_granularity=full", "rollout.vllm.max_num_batched_tokens=4096"]
    check(load(path, fitting), 2, "train")


def test_an_empty_data_file_is_refused(path: Path) -> None:
    (path.parent / "train.jsonl").write_text("")
    assert "is empty" in refusal(path, [])


def test_a_command_needs_only_the_files_it_reads(path: Path) -> None:
    check(load(path, ["data.train=nowhere.jsonl"]), 2, "evaluate")
    assert "data.evaluate=none.jsonl" in refusal(path, ["data.evaluate=none.jsonl"], command="evaluate")


def test_evaluation_during_training_needs_evaluation_data(path: Path) -> None:
    check(load(path, ["data.evaluate=null"]), 2, "train")
    assert "data.evaluate: missing" in refusal(path, ["data.evaluate=null", "run.evaluate_every=5"])


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


def test_the_engine_must_divide_the_ranks_unless_replicas_serve(path: Path) -> None:
    served = ["rollout.engine_tensor=4", "serving.replicas=1"]
    check(load(path, served), 2, "train")
    check(load(path, [*served, "cold_start.episodes=0"]), 2, "cold-start")
    for command, given in (("train", served[:1]), ("cold-start", served), ("evaluate", served)):
        message = refusal(path, given, command=command)
        assert message == "rollout.engine_tensor=4 must divide the number of ranks 2; choose 1, 2"


def test_a_cold_start_needs_tasks_only_to_play_them(path: Path) -> None:
    missing = "data.train=nowhere.jsonl"
    assert refusal(path, [missing], command="cold-start").startswith(f"{missing}: no such file")
    for given in (["data.train=null"], [missing, "cold_start.episodes=0"]):
        check(load(path, given), 2, "cold-start")


def test_trajectories_spread_evenly_over_minibatches_and_ranks(path: Path) -> None:
    # 2 replicas of 2 ranks: 60 tasks are even, but 60 trajectories over 8 minibatches x 2 ranks are not.
    message = refusal(path, ["rollout.tasks_per_iteration=60", "update.minibatches=8"], world=4)
    assert "= 60 trajectories must be a multiple of update.minibatches=8 * 2 data-parallel ranks" in message
    assert "choose 48 or 64" in message


@pytest.mark.parametrize("source", ["old_policy", "rollout"])
def test_a_fused_router_cannot_replay_experts(source: str) -> None:
    given = {
        "model": {"path": "m"},
        "megatron": {"moe_router_fusion": True},
        "algorithm": {"routing_replay": source},
    }
    with pytest.raises(ConfigError) as error:
        passed_on.check_megatron(Config.model_validate(given))
    assert str(error.value) == (
        "megatron.moe_router_fusion=True: the fused router cannot replay experts "
        f"(algorithm.routing_replay={source}); leave it out, or set algorithm.routing_replay=off"
    )


def test_experts_of_the_engine_are_not_replayed_if_turns_go_on_with_new_weights() -> None:
    def config(**of_serving: object) -> Config:
        routed = {"routing_replay": "rollout"}
        return Config.model_validate({"model": {"path": "m"}, "algorithm": routed, "serving": of_serving})

    with pytest.raises(
        ConfigError, match=r"serving\.update=recompute with algorithm\.routing_replay=rollout"
    ):
        enforce(_steps(config(replicas=2, update="recompute")))
    enforce(_steps(config(replicas=2, update="drain")))
    enforce(_steps(config(update="recompute")))  # without replicas, no turn runs when weights arrive


def test_a_backend_of_attention_is_one_of_megatrons() -> None:
    given = {"model": {"path": "m"}, "megatron": {"attention_backend": "cudnn"}}
    with pytest.raises(
        ConfigError, match=r"megatron.attention_backend='cudnn': .*; choose one of flash, fused,"
    ):
        passed_on.check_megatron(Config.model_validate(given))
    passed_on.check_megatron(Config.model_validate(given | {"megatron": {"attention_backend": "unfused"}}))


def test_the_context_must_fit_the_model_and_the_tokenizer_needs_a_chat_template(path: Path) -> None:
    assert "max_position_embeddings=32768" in refusal(path, ["rollout.max_context=40000"])
    (path.parent / "model" / "chat_template.jinja").unlink()
    assert "no chat_template" in refusal(path, [])


def test_a_penalty_above_the_longest_episode_is_refused(path: Path) -> None:
    limits = ["environment.max_turns=3", "rollout.max_turn_tokens=10", "algorithm.overlong_to=99"]
    assert refusal(path, [*limits, "algorithm.overlong_from=40"]) == (
        "algorithm.overlong_from=40: an episode has at most 40 action tokens, by environment.max_turns, "
        "rollout.max_turn_tokens and rollout.max_context; choose less, or null"
    )
    check(load(path, [*limits, "algorithm.overlong_from=39"]), 2, "train")


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


def test_a_critic_starts_from_a_model_of_the_actors_architecture(path: Path) -> None:
    other, shape = path.parent / "other", json.loads((path.parent / "model" / "config.json").read_text())
    other.mkdir()
    (other / "config.json").write_text(json.dumps(shape | {"tie_word_embeddings": True}))
    check(load(path, [f"model.critic_path={other}"]), 2, "train")
    Tokenizer(models.BPE({"a": 1, " ": 0}, [])).save(str(other / "tokenizer.json"))
    found = refusal(path, [f"model.critic_path={other}"])
    assert found.startswith(f"model.critic_path={other}: its tokenizer gives 2 of model.path's 2 tokens")
    (other / "config.json").write_text(json.dumps(shape | {"rope_theta": 1e6}))
    message = refusal(path, [f"model.critic_path={other}"])
    assert message.endswith(
        "other: its rope_theta=1000000.0, model.path's is 10000.0; give a checkpoint of the same "
        "architecture, or leave it out"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"num_hidden_layers": 2, "vocab_size": 1088, "model_type": "qwen2"}, ""),
        (
            {"vocab_size": 1000},
            "its vocab_size=1000 is less than model.path's of 1024; give a model with the",
        ),
        (
            {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32},
            "parallel.tensor=2 must divide model.num_attention_heads=1; choose 1",
        ),
        (
            {"max_position_embeddings": 64},
            "its max_position_embeddings=64 is less than the longest trajectory of 7048 tokens; give another",
        ),
    ],
)
def test_a_reference_may_have_another_size_that_the_layout_divides(
    path: Path, changes: dict[str, object], says: str
) -> None:
    shape = json.loads((path.parent / "model" / "config.json").read_text()) | changes
    teacher = path.parent / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text(json.dumps(shape))
    (teacher / "tokenizer.json").write_text((path.parent / "model" / "tokenizer.json").read_text())
    given = [f"model.reference_path={teacher}", "algorithm.preset=distil"]
    if says:
        assert refusal(path, given).startswith(f"model.reference_path={teacher}: {says}")
    else:
        check(load(path, given), 2, "train")


def test_distillation_needs_a_teacher_and_a_critics_folder_a_critic(path: Path) -> None:
    found = refusal(path, ["algorithm.preset=distil"])
    assert found.startswith("model.reference_path=null with algorithm.advantage=kl: the policy would be")
    given = [
        f"model.critic_path={path.parent / 'model'}",
        "algorithm.preset=grpo",
        "rollout.samples_per_task=2",
    ]
    assert "with algorithm.advantage=group: there is no critic" in refusal(path, given)


def test_a_reference_has_the_tokens_of_the_policy_and_is_read_only_by_what_builds_it(path: Path) -> None:
    teacher = path.parent / "teacher"
    given = [f"model.reference_path={teacher}", "algorithm.preset=distil"]
    assert "teacher: no such folder" in refusal(path, given)
    check(load(path, given), 2, "evaluate")
    teacher.mkdir()
    (teacher / "config.json").write_text((path.parent / "model" / "config.json").read_text())
    check(load(path, given), 2, "plan")
    assert "teacher: holds no tokenizer.json" in refusal(path, given)
    Tokenizer(models.BPE({"a": 0, " ": 1, "b": 2}, [])).save(str(teacher / "tokenizer.json"))
    check(load(path, given), 2, "train")
    Tokenizer(models.BPE({"a": 1, " ": 0}, [])).save(str(teacher / "tokenizer.json"))
    assert refusal(path, given).endswith(
        "teacher: its tokenizer gives 2 of model.path's 2 tokens another id or none, such as ' '; give a "
        "model with the same tokens"
    )
    assert refusal(path, [given[0], "algorithm.kl_coefficient=0"]).endswith(
        "teacher with algorithm.kl_coefficient=0: no reference is built; leave it out, or set "
        "algorithm.kl_coefficient, or algorithm.preset=distil"
    )
    with pytest.raises(ConfigError, match="advantage='kl' with kl_in=reward and kl_coefficient=0"):
        load(path, ["algorithm.preset=distil", "algorithm.kl_coefficient=0"])


def test_checks_do_not_touch_the_run_folder(path: Path) -> None:
    config: Config = load(path)
    check(config, 2, "train")
    assert not config.run.folder.exists()


def test_a_replay_needs_neither_tasks_nor_an_engine_that_fits(path: Path) -> None:
    check(load(path, ["data.train=null", "rollout.engine_tensor=3"]), 2, "replay")
    assert "rollout.engine_tensor=3" in refusal(path, ["rollout.engine_tensor=3"], command="rollout")


def test_functions_of_the_user_are_found_before_a_model_is_built(path: Path) -> None:
    (path.parent / "recipe.py").write_text("def loss(*given): ...\n")
    ppo = "algorithm.preset=ppo"
    check(load(path, [ppo, "algorithm.loss=recipe:loss"]).beside(path.parent), 2, "train")
    message = refusal(path, [ppo, "algorithm.advantage=recipes:one"])
    assert message.startswith(
        "algorithm.advantage=recipes:one: no allowed folder has this module; give MODULE:"
    )
    message = refusal(path, [ppo, "algorithm.loss=recipe:loss", "parallel.tensor=1", "parallel.context=2"])
    assert message.startswith("parallel.context=2 with algorithm.loss=recipe:loss: the function gets whole")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("loss = 3", "algorithm.loss=recipe3: is no function; give MODULE:FUNCTION"),
        ("def loss(new_T): ...", "algorithm.loss=recipe3: TypeError: loss() takes 1 positional argument but"),
        ("def loss(new_T, *given): return new_T.log()", "algorithm.loss=recipe3: ValueError: loss: returned"),
        (
            "def loss(*given): raise OSError('disk')",
            "algorithm.loss=recipe3: recipe3.py line 1: OSError: disk;",
        ),
    ],
)
def test_a_function_of_the_user_is_checked_when_a_run_starts(
    path: Path, monkeypatch: pytest.MonkeyPatch, function: str, problem: str
) -> None:
    (path.parent / "recipe3.py").write_text(function)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "recipe3", raising=False)
    importlib.invalidate_caches()
    config = load(path, ["algorithm.preset=ppo", "algorithm.loss=recipe3"]).beside(path.parent)
    with pytest.raises(ConfigError) as raised:
        Own.of(config)
    assert str(raised.value).startswith(problem)
    assert len(str(raised.value).splitlines()) == 1
