"""Adapters that a model cannot have, and how fields of `model.lora` are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_stppo.config import Config, ConfigError, LoraConfig
from megatron_stppo.config.file import validate
from megatron_stppo.config.section import enforce
from megatron_stppo.validation import checks, lora
from megatron_stppo.validation.lora import alone, of_targets
from tests.weights.reshard.pieces import model_shape

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("rank", "targets", "sizes", "message"),
    [
        (5, ["all-linear"], {}, "rank=5: is larger than the smallest .*k_proj.weight, 4; choose 1"),
        (9, ["up_proj"], {}, r"rank=9: is larger than .*up_proj\.weight, 8; choose 1 to 8"),
        (1, [], {}, r"targets=\[\]: matches no layer; give at least one, or all-linear"),
        (
            *(1, ["q_proj", "up_proj"], {"family": "qwen3_moe", "experts": 4}),
            r"targets=\['q_proj', 'up_proj'\]: up_proj belongs to the experts, and an adapter would",
        ),
    ],
)
def test_adapters_that_do_not_fit_the_model_are_refused(rank, targets, sizes, message):
    given = LoraConfig(rank=rank, targets=targets)
    with pytest.raises(ConfigError, match=message) as error:
        enforce(of_targets(model_shape(**sizes), rank, given.names, given.targets))
    assert "\n" not in str(error.value)


def test_all_linear_leaves_experts_out():
    names = LoraConfig(rank=4).names
    assert names == ALL
    enforce(of_targets(model_shape(family="qwen3_moe", experts=4), 4, names, ("all-linear",)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"critic_path": "c"}, "critic_path=c: with model.lora.rank=4 the critic shares"),
        ({"layers": "transformer_engine"}, "transformer_engine: its layers do not return the input"),
    ],
)
def test_what_adapters_exclude_is_refused(model, message):
    config = Config.model_validate({"model": {"path": "m", "lora": {"rank": 4}} | model})
    with pytest.raises(ConfigError, match=message):
        lora.check(config)


def test_adapters_that_vllm_cannot_apply_are_refused():
    with pytest.raises(
        ConfigError, match=r"rank=513: vLLM applies .* 512 at most; .* set model\.lora\.sync=merged"
    ):
        enforce(alone(model_shape(), 513))
    with pytest.raises(
        ConfigError, match=r"sync=adapter: .* experts .* set model\.lora\.sync=merged, or choose"
    ):
        enforce(alone(model_shape(family="qwen3_moe", experts=4), 4))
    config = Config.model_validate({"model": {"path": "m", "lora": {"sync": "adapter"}}})
    with pytest.raises(ConfigError, match=r"sync=adapter: with model\.lora\.rank=0 all weights are trained"):
        lora.check(config)


def test_adapters_of_a_run_without_them_cannot_be_exported():
    with pytest.raises(ConfigError, match=r"lora\.rank=0: convert to-peft writes adapters, .* convert to-hf"):
        lora.check_used(Config.model_validate({"model": {"path": "m"}}), "convert to-peft")


def test_a_target_may_be_a_word_and_an_unknown_one_is_refused_in_one_line():
    one = validate({"model": {"path": "m", "lora": {"rank": 4, "targets": "q_proj"}}})
    assert one.model.lora.names == ("q_proj",)
    with pytest.raises(ConfigError, match=r"lora\.targets\.1='w1': Input should be 'all-linear', ") as error:
        validate({"model": {"path": "m", "lora": {"rank": 4, "targets": ["q_proj", "w1"]}}})
    assert "\n" not in str(error.value)


def test_a_cold_start_of_adapters_writes_a_new_folder(tmp_path: Path) -> None:
    section = {"rank": 1, "path": tmp_path}
    for given, said in ((section, "is model.lora.path; name another"), ({"rank": 1}, "already exists; name")):
        sections = {"model": {"path": "model", "lora": given}, "cold_start": {"output": tmp_path}}
        with pytest.raises(ConfigError, match=re.escape(f"cold_start.output={tmp_path}: {said}")):
            checks.check_output(Config.model_validate(sections))
