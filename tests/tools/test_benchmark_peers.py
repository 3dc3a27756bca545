"""tools/benchmark_peers.py without TRL and without a network: its cases, model, game, runs and table."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import Config, EnvironmentConfig
from megatron_stppo.environments.base import StepResult
from megatron_stppo.rollout.episodes.episode import encode_plain
from megatron_stppo.rollout.vllm.vllm_setup import end_of_text_ids
from tools import benchmark_peers
from tools.peers import game, model, run
from tools.peers.cases import CASES, SIDES, Size, Start

TINY = Size(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=32, ffn=32)
PEERS = Path(run.HERE)


def test_a_start_names_processes_threads_and_amount() -> None:
    assert Start.parse("2x1") == Start(2, 1)
    assert Start.parse("1x2/8") == Start(1, 2, 8)
    assert [str(Start.parse(text)) for text in ("2x1", "1x2/8")] == ["2x1", "1x2/8"]
    for wrong in ("2", "0x2", "1x0", "1x2/", "1x2/8/8"):
        with pytest.raises(ValueError, match="is not PROCESSESxTHREADS"):
            Start.parse(wrong)


def test_the_model_never_writes_end_of_text(tmp_path: Path) -> None:
    assert model.write(tmp_path, TINY) == sum(
        p.numel() for p in Qwen3ForCausalLM.from_pretrained(tmp_path).parameters()
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == model.VOCABULARY
    ids = torch.randint(model.VOCABULARY, (4, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        p = Qwen3ForCausalLM.from_pretrained(tmp_path)(ids).logits.softmax(-1)
    assert p[:, :, tokenizer.eos_token_id].max() == 0
    others = p.sum((0, 1)) > 0
    assert others.sum() == model.VOCABULARY - 1


def test_a_real_model_keeps_its_weights_and_ends_at_another_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, adapted = tmp_path / "source", tmp_path / "adapted"
    model.write(source, TINY)
    weights = Qwen3ForCausalLM.from_pretrained(source).bfloat16()
    weights.save_pretrained(source)
    for folder, missing in ((tmp_path, "config.json"), (source, f"token {model.NEVER}")):
        with pytest.raises(RuntimeError, match=f"has no {missing}"):
            model.adapt(adapted, folder)
    monkeypatch.setattr(model, "NEVER", "z")
    assert model.adapt(adapted, source) == weights.num_parameters()
    tokenizer = AutoTokenizer.from_pretrained(adapted)
    end = tokenizer.convert_tokens_to_ids("z")
    assert end_of_text_ids(adapted, AutoConfig.from_pretrained(adapted), tokenizer) == [end]
    for name, found in Qwen3ForCausalLM.from_pretrained(adapted).state_dict().items():
        assert found.dtype == torch.float32 and torch.equal(found, weights.state_dict()[name].float()), name


def test_both_trainers_read_the_same_tokens_after_a_turn() -> None:
    """TRL renders a tool's answer with the chat template, after an assistant's message; ours encodes it."""
    tokenizer = model.make_tokenizer()
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    before = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answer = {"role": "tool", "name": "look", "content": game.OBSERVATION}
    ids = [
        tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, add_generation_prompt=generation
        )
        for messages, generation in ((before, False), ([*before, answer], True))
    ]
    assert ids[1][: len(ids[0])] == ids[0] and ids[0][-1] == tokenizer.eos_token_id
    assert ids[1][len(ids[0]) :] == encode_plain(tokenizer, game.OBSERVATION)


def test_our_configuration_is_valid_and_describes_the_case(tmp_path: Path) -> None:
    given = run.config(tmp_path, CASES["large-3"], SIDES["ours"], Start(1, 2, 4096), 5)
    config = Config.model_validate(given)
    assert (config.environment.max_turns, config.rollout.max_turn_tokens) == (3, 64)
    assert config.rollout.tasks_per_iteration * config.rollout.samples_per_task == 64
    assert (config.update.minibatches, config.update.tokens_per_microbatch) == (4, 4096)
    assert not config.needs_critic and not config.needs_reference
    assert not config.model.lora.rank and not config.run.async_checkpoints
    assert config.max_context >= 128 + 3 * (64 + config.environment.max_observation_tokens)


def test_other_sides_train_adapters_or_a_critic(tmp_path: Path) -> None:
    lora, st_ppo = (
        Config.model_validate(run.config(tmp_path, CASES["smollm2"], SIDES[side], Start(1, 2), 5))
        for side in ("ours-lora", "st_ppo")
    )
    assert (lora.model.lora.rank, lora.model.lora.alpha, lora.model.lora.targets) == (16, 32, ("all-linear",))
    assert not lora.needs_critic and st_ppo.needs_critic and not st_ppo.model.lora.rank
    assert st_ppo.rollout.samples_per_task == 4


def test_an_episode_has_as_many_turns_as_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    environment = load("our_environment").factory(EnvironmentConfig(max_turns=3))()
    task = Task("peers", (Message("user", game.question(1)),), ("-",), "train", 0)

    async def play() -> list[StepResult]:
        await environment.reset(task, 0)
        return [await environment.step(text) for text in ("a", "b", "c")]

    steps = asyncio.run(play())
    assert [step.observation for step in steps] == [game.OBSERVATION, game.OBSERVATION, ""]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[-1].reward == game.reward("abc") == float((97 + 98 + 99) % 2)


def test_the_side_of_trl_reads_exactly_the_settings_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(python: Any, script: list[Path], *_: Any) -> int:
        script[2].write_text('{"iterations": []}')
        return 7

    monkeypatch.setattr(run, "_start", start)
    monkeypatch.setattr(run, "install", lambda: "python")
    found = run.trl(tmp_path, CASES["small"], SIDES["trl"], Start(1, 2), 5)
    assert found == {"iterations": [], "memory": 7}
    given = set(json.loads((tmp_path / "trl.json").read_text()))
    assert given == set(re.findall(r'given\["(\w+)"\]', (PEERS / "trl_side.py").read_text()))


def test_our_side_is_read_from_the_rows_of_its_metrics() -> None:
    row = {"seconds": 3.0, "seconds/rollout": 2.0, "rollout/action_tokens": 2048, "rollout/tokens": 2100}
    assert run._row(row) == {"generation": 2.0, "seconds": 3.0, "written": 2048, "read": 52}


def test_memory_is_the_peak_of_a_program_and_its_children_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "EVERY", 0.05)
    hold = "import time; held = bytearray(b'x') * (200 << 20); time.sleep(1)"
    parent = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {hold!r}]); {hold}"
    found = run._start([sys.executable], ["-c", f"{parent}; child.wait()"], Start(1, 1), tmp_path / "log", {})
    assert 400 << 20 < found < 500 << 20


def test_a_program_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LIMIT", 1.0)
    with pytest.raises(RuntimeError, match="no end after 1 s"):
        run._start(["sh"], ["-c", "sleep 60 & echo $!; wait"], Start(1, 1), tmp_path / "log", {})
    pid = int((tmp_path / "log").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_that_generates_too_little_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"generation": 1.0, "seconds": 2.0, "written": 2047}
    monkeypatch.setattr(run, "ours", lambda *_: {"iterations": [row] * 4, "memory": 7})
    with pytest.raises(RuntimeError, match=r"ours generated \[2047, 2047\] tokens .* not 2048"):
        benchmark_peers.one("ours", tmp_path, CASES["small"], Start(1, 2), 5, 3)


def test_the_table_compares_the_fastest_start_of_each_side() -> None:
    rows = {
        ("trl", "1x2"): [(1.0, 3.0), (1.0, 4.0), (1.0, 9.0)],  # generation, all; the median is 4
        ("trl", "2x1"): [(1.0, 5.0)],
        ("ours", "1x2"): [(0.5, 2.5)],
        ("ours", "2x1"): [(0.5, 2.0)],
    }
    runs = [
        {
            "case": "small",
            "side": side,
            "start": start,
            "parameters": 722304,
            "memory": (3 if side == "trl" else 2) << 30,
            "iterations": [{"generation": g, "seconds": s} for g, s in found],
        }
        for (side, start), found in rows.items()
    ]
    record = {"machine": "2 cores; 2026-11-22", "versions": {"trl": "1.16.0"}, "runs": runs}
    assert benchmark_peers.table(record).splitlines() == [
        "2 cores; 2026-11-22; trl 1.16.0",
        "",
        "| parameters | turns x tokens | trainer | start | generation | training | total | seconds | GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 0.7 M | 1 x 32 | TRL | 1x2 | 2,048 | 683 | 512 | 4.00 | 3.0 |",
        "| 0.7 M | 1 x 32 | megatron-stppo | 2x1 | 4,096 | 1,365 | 1,024 | 2.00 | 2.0 |",
        "|  |  | TRL / ours |  | 2.0x | 2.0x | **2.0x** |  | 1.5x |",
    ]


def test_wrong_arguments_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_peers.main(["--cases", "huge"]) == 2
    assert benchmark_peers.main(["--ours", "two"]) == 2
    said = capsys.readouterr().err
    assert "'huge' is not known; choose cases from small, large" in said and "'two' is not PROCESSES" in said


def load(name: str) -> ModuleType:
    """A module of tools/peers under the name that a run imports it by."""
    specification = importlib.util.spec_from_file_location(name, PEERS / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules.pop("game", None)
    specification.loader.exec_module(module)
    return module
