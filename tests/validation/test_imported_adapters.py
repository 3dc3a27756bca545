"""Adapters in the format of the package `peft` with which a run can begin, and those that are refused."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_stppo import __main__ as command_line
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import load, validate
from megatron_stppo.config.peft_folder import PREFIX, SETTINGS, TENSORS
from megatron_stppo.data.text.tokenizer_files import digests
from megatron_stppo.validation import lora
from tests.training.update.imported import WRITTEN, save, write_adapter

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 12,
    "vocab_size": 16,
}
QUERY = "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path / "model"


def config(model: Path, adapter: Path, **fields: Any) -> Config:
    given = validate({"model": {"path": str(model), "lora": {"path": str(adapter), **fields}}})
    lora.check(given)
    return given


def refused(model: Path, adapter: Path, **fields: Any) -> str:
    with pytest.raises(ConfigError) as error:
        config(model, adapter, **fields)
    message = str(error.value)
    assert "\n" not in message and len(message) < 600, message
    return message.replace(str(adapter), "ADAPTER").replace(str(model), "MODEL")


def test_rank_alpha_and_targets_are_read_from_the_folder_and_saved_with_the_run(model: Path) -> None:
    adapter = model.with_name("adapter")
    write_adapter(adapter, model, r=2, lora_alpha=6, target_modules=["v_proj", "q_proj"])
    given = config(model, adapter)
    section = given.model.lora
    assert (section.rank, section.alpha, section.targets) == (2, 6.0, ("q_proj", "v_proj"))
    assert config(model, adapter, rank=2, alpha=6, targets=["v_proj", "q_proj"]).model.lora.scale == 3.0
    (model.parent / "config.yaml").write_text(given.dump())
    (adapter / TENSORS).unlink()
    assert load(model.parent / "config.yaml") == given, "the configuration of a run does not need the folder"
    assert validate({"model": {"path": "m"}}).model.lora.path is None


def test_what_reads_a_checkpoint_is_checked_without_the_folder(model: Path) -> None:
    adapter = model.with_name("adapter")
    write_adapter(adapter, model, r=2)
    begins = config(model, adapter)
    (adapter / SETTINGS).unlink()
    with pytest.raises(ConfigError, match=r"adapter_config\.json cannot be read"):
        lora.check(begins)
    follows = begins.of_checkpoint()
    lora.check(follows)
    section = follows.model.lora
    assert (section.rank, section.alpha, section.path) == (2, begins.model.lora.alpha, None)
    assert section.targets == begins.model.lora.targets


def test_an_adapter_that_was_trained_with_another_tokenizer_is_refused(model: Path) -> None:
    adapter = model.with_name("adapter")
    tensors = {PREFIX + key: tensor for key, tensor in write_adapter(adapter, model, r=2).items()}
    save_file(tensors, adapter / TENSORS, digests(model))
    config(model, adapter)
    (model / "tokenizer.json").write_text("{}")
    assert refused(model, adapter) == (
        "model.lora.path=ADAPTER: was trained with another tokenizer than that of model.path=MODEL; give the "
        "model that it was trained on, or another adapter"
    )


def test_the_folders_of_a_model_in_the_cache_of_hugging_face_have_its_name(model: Path) -> None:
    snapshot = model.parent / "models--Qwen--Qwen3-8B" / "snapshots" / "9c925d64"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    (link := model.with_name("link")).symlink_to(snapshot)
    for base, noted in (("Qwen/Qwen3-8B", False), ("Qwen/Qwen3", True), ("Other/Qwen3-8B", True)):
        adapter = model.with_name(base.replace("/", " "))
        write_adapter(adapter, snapshot, r=1, base_model_name_or_path=base)
        assert [bool(lora.base_note(config(path, adapter))) for path in (snapshot, link)] == [noted] * 2


def test_what_peft_records_about_training_and_dropout_changes_nothing(model: Path) -> None:
    adapter = model.with_name("adapter")
    trained = {
        "lora_dropout": 0.05,
        "inference_mode": False,
        "init_lora_weights": "gaussian",
        "task_type": None,
    }
    write_adapter(adapter, model, r=1, **trained)
    assert config(model, adapter, targets="all-linear").model.lora.rank == 1


def test_an_adapter_that_names_another_model_is_noted(model: Path) -> None:
    for base, noted in (("Qwen/model", False), (str(model), False), (None, False), ("Qwen/other", True)):
        adapter = model.with_name(f"of {base}".replace("/", " "))
        write_adapter(adapter, model, r=1, base_model_name_or_path=base)
        note = lora.base_note(config(model, adapter))
        assert note == noted * (
            f"model.lora.path={adapter}: its adapter_config.json names the model 'Qwen/other', and "
            f"model.path={model}; only names and shapes of their weights were compared"
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_rslora", True),
        ("use_dora", True),
        ("use_qalora", True),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("layers_to_transform", [0]),
        ("layer_replication", [[0, 1]]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("task_type", "SEQ_CLS"),
        ("peft_type", "LOHA"),
        ("an_option_of_the_future", 3),
        ("a" * 900_000, True),
        ("\n" * 400_000, True),
    ],
)
def test_an_option_that_changes_the_result_is_refused(model: Path, name: str, value: Any) -> None:
    adapter = model.with_name("adapter")
    write_adapter(adapter, model, r=1, **{name: value})
    shown = f"{name}={json.dumps(value)}"
    if len(name) > 120:  # the quotation mark and 119 characters of backslashes and n
        shown = f"{name[:120] if name.isidentifier() else repr(name)[:120]}..=true"
    line = f"model.lora.path=ADAPTER: adapter_config.json has {shown}, which is not supported; "
    assert refused(model, adapter) == (
        line
        + "merge the adapter into its model with peft (merge_and_unload), and give that folder as model.path"
    )


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"rank": 1},
            "model.lora.rank=1: the adapter in model.lora.path=ADAPTER has rank 2; leave model.lora.rank out",
        ),
        ({"rank": 0}, "model.lora.rank=0: the adapter in model.lora.path=ADAPTER has rank 2; leave"),
        ({"alpha": 5}, "model.lora.alpha=5.0: the adapter in model.lora.path=ADAPTER has alpha 6.0; leave"),
        (
            {"targets": ["q_proj"]},
            "model.lora.targets=['q_proj']: the adapter in model.lora.path=ADAPTER has ['q_proj', 'k_proj'",
        ),
    ],
)
def test_a_field_that_contradicts_the_adapter_is_refused(model: Path, fields: Any, line: str) -> None:
    write_adapter(model.with_name("adapter"), model, r=2)
    assert refused(model, model.with_name("adapter"), **fields).startswith(line)


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return write_adapter(model.with_name("whole"), model, r=2)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {QUERY: None},
            f"has no {QUERY}, but other layers' q_proj; give an adapter of the model in model.path=MODEL",
        ),
        ({QUERY: torch.zeros(2, 9)}, f"{QUERY} has shape [2, 9], here it must be [2, 8]; give an adapter of"),
        ({QUERY: torch.zeros(3, 8)}, f"{QUERY} has shape [3, 8], here it must be [2, 8]; give an adapter of"),
        (
            {QUERY: torch.zeros(2, 8).long()},
            f"tensor 'base_model.model.{QUERY}' has type I64; save it as one of",
        ),
        (
            {QUERY.replace("layers.0", "layers.2"): torch.zeros(2, 8)},
            f"has {QUERY.replace('layers.0', 'layers.2')}, which this model does not have; give an adapter",
        ),
        (
            {"lm_head.lora_A.weight": torch.zeros(2, 8)},
            "tensor 'base_model.model.lm_head.lora_A.weight' does not",
        ),
        (
            {"model.layers.0.mlp.experts.0.up_proj.lora_A.weight": torch.zeros(2, 8)},
            "tensor 'base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight' does not belong",
        ),
        (
            {"model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.zeros(8)},
            "tensor 'base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector' does not belong",
        ),
        (
            {QUERY: torch.zeros([1] * 50)},
            f"tensor 'base_model.model.{QUERY}' has 50 dimensions, not 2; merge",
        ),
        (
            {f"model.layers.0.{'x' * 1_000_000}.q_proj.lora_A.weight": torch.zeros(2, 8)},
            f"tensor 'base_model.model.model.layers.0.{'x' * 88}..' has a name of 1000053 characters; merge",
        ),
    ],
)
def test_matrices_of_another_model_are_refused(model: Path, changes: dict[str, Any], line: str) -> None:
    changed = tensors_of(model) | changes
    adapter = model.with_name("adapter")
    save(adapter, {key: value for key, value in changed.items() if value is not None}, WRITTEN | {"r": 2})
    assert refused(model, adapter).startswith(f"model.lora.path=ADAPTER: {line}")


class Code:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        (
            TENSORS,
            None,
            "there is no adapter_model.safetensors; save the adapter with safe_serialization=True",
        ),
        (TENSORS, b"", "adapter_model.safetensors is not a safetensors file; write the adapter again"),
        (
            TENSORS,
            b"\xff" * 64,
            "adapter_model.safetensors is not a safetensors file; write the adapter again",
        ),
        (
            TENSORS,
            b"\2\0\0\0\0\0\0\0{}",
            "adapter_model.safetensors holds no tensor; write the adapter again",
        ),
        (SETTINGS, None, "adapter_config.json cannot be read (No such file or directory); write the adapter"),
        (SETTINGS, b"{", "adapter_config.json is not JSON (Expecting property name"),
        (SETTINGS, b"[]", "adapter_config.json is not an object of at most 1 MiB; write the adapter again"),
        (SETTINGS, b" " * (1 << 20) + b"{}", "adapter_config.json is not an object of at most 1 MiB; write"),
        (SETTINGS, b"{}", "adapter_config.json has no peft_type; give an adapter that the package peft has"),
        (SETTINGS, {"r": -1}, "adapter_config.json has r=-1, not a number above 0; write the adapter again"),
        (SETTINGS, {"r": 1.5}, "adapter_config.json has r=1.5, not a whole number; write the adapter again"),
        (SETTINGS, {"r": 10**400}, "adapter_config.json has r=1000"),
        (
            SETTINGS,
            {"lora_alpha": float("nan")},
            "adapter_config.json has lora_alpha=NaN, not a number above 0",
        ),
        (SETTINGS, {"lora_alpha": "16"}, 'adapter_config.json has lora_alpha="16", not a number above 0'),
    ],
)
def test_files_that_are_missing_or_broken_are_refused(
    model: Path, name: str, content: Any, line: str
) -> None:
    adapter = model.with_name("adapter")
    write_adapter(adapter, model, r=1)
    (adapter / name).unlink()
    if content is not None:
        text = json.dumps(WRITTEN | content).encode() if isinstance(content, dict) else content
        (adapter / name).write_bytes(text)
    assert refused(model, adapter).startswith(f"model.lora.path=ADAPTER: {line}")


def test_a_pickle_is_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = model.with_name("adapter")
    write_adapter(adapter, model, r=1)
    (adapter / TENSORS).unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Code()))
    monkeypatch.chdir(model)
    assert "; adapter_model.bin is not read, because a pickle can run code; save" in refused(model, adapter)
    assert not (model / "ran").exists()


def test_a_folder_that_is_not_there_is_one_line_of_the_command_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model.with_name("run.yaml")
    file.write_text(json.dumps({"model": {"path": str(model), "lora": {"path": "nowhere"}}}))
    monkeypatch.setattr(sys, "argv", ["megatron-stppo", "train", str(file)])
    assert command_line.run() == 2
    assert capsys.readouterr().err == (
        "megatron-stppo: model.lora.path=nowhere: no such folder; give one with adapter_config.json and "
        "adapter_model.safetensors\n"
    )
