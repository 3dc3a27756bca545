"""Prompts that are too long are found before a run, as an episode would find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo.base.types import Message
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.text.chat import encode_chat
from megatron_stppo.rollout.episodes.episode import Episode, Limits
from megatron_stppo.rollout.episodes.fitting import FittingTasks, fitting_tasks, sample
from tests.broken_inputs.inputs import SHAPE
from tests.data.text.test_chat import TOKENIZERS
from tests.rollout.vllm.tiny import build_tokenizer, task

LIMIT = 60


def config(folder: Path, *prompts: Any, kind: str = "guess", **sections: Any) -> Config:
    """Write tasks, a tokenizer and a config.json, and return a configuration with them."""
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    rows = [
        {
            "data_source": "t",
            "prompt": prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}],
            "reward_model": {"ground_truth": "x"},
        }
        for prompt in prompts
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "model": {"path": folder},
        "data": {"train": folder / "tasks.jsonl", "evaluate": folder / "tasks.jsonl"},
        "environment": {"kind": kind} | ({"command": ["true"]} if kind == "agent" else {}),
        "rollout": {"max_prompt_tokens": LIMIT},
    }
    return Config.model_validate(given | sections)


def of_length(tokens: int) -> str:
    """Return a content with which the prompt has this many tokens: a "." has one token."""
    empty = len(encode_chat(build_tokenizer(), [Message("user", ".")])) - 1
    return "." * (tokens - empty)


def test_the_longest_prompt_that_fits_stays_and_one_with_another_token_is_left_out_with_a_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = config(tmp_path, of_length(LIMIT), of_length(LIMIT + 1), "é" * 200, "Which?")
    found = fitting_tasks(chosen, "train", shown=True)
    assert ([t.index for t in found.tasks], found.overlong) == ([0, 3], 2)
    assert capsys.readouterr().err == (
        f"megatron-stppo: data.train={tmp_path}/tasks.jsonl: 2 of 4 prompts are longer than "
        f"rollout.max_prompt_tokens={LIMIT} allows; their tasks are left out (the longest has "
        f"{len(encode_chat(build_tokenizer(), [Message('user', 'é' * 200)]))} tokens)\n"
    )
    assert fitting_tasks(chosen, "train", shown=False) == found
    assert capsys.readouterr().err == ""


def test_held_out_tasks_are_sampled_before_the_long_ones_are_left_out(tmp_path: Path) -> None:
    prompts = ["x" * 500 if i % 2 else "Which?" for i in range(40)]
    chosen = config(tmp_path, *prompts, evaluate={"tasks": 20})
    numbers = sample(range(40), 20)
    found = fitting_tasks(chosen, "evaluate", shown=False)
    assert [t.index for t in found.tasks] == [i for i in numbers if i % 2 == 0]
    assert found.overlong == sum(i % 2 for i in numbers) > 0


def test_prompts_that_are_all_too_long_and_those_that_a_template_rejects_give_one_line(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError) as raised:
        fitting_tasks(config(tmp_path, of_length(90), of_length(80)), "train", shown=True)
    assert str(raised.value) == (
        f"data.train={tmp_path}/tasks.jsonl: all 2 prompts are longer than rollout.max_prompt_tokens={LIMIT} "
        "allows (the shortest has 80 tokens); raise the limit, or shorten the prompts"
    )
    calls = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [{"function": {}}]}]
    with pytest.raises(ConfigError, match=r"tasks\.jsonl row 2: model\.path: its chat template leaves out"):
        fitting_tasks(config(tmp_path, "Which?", calls), "evaluate", shown=False)


def test_the_prompts_of_agents_are_not_measured_because_agents_send_their_own(tmp_path: Path) -> None:
    chosen = config(tmp_path, "x" * 500, kind="agent")
    assert fitting_tasks(chosen, "train", shown=False) == FittingTasks(
        fitting_tasks(config(tmp_path, "x" * 500, rollout={}), "train", shown=False).tasks, 0
    )


@pytest.mark.parametrize("tokenizer", [t for t, _ in TOKENIZERS.values()], ids=TOKENIZERS)
@settings(deadline=None, max_examples=60)
@given(text=st.lists(st.sampled_from([*"aW</s> \n'", "</s>", "<|im_end|>", "<|eot_id|>"])).map("".join))
def test_an_ascii_prompt_has_at_most_one_token_more_than_characters(tokenizer: Any, text: str) -> None:
    chat = [Message("user", text)]
    rendered = tokenizer.apply_chat_template([chat[0].as_dict()], add_generation_prompt=True, tokenize=False)
    assert len(encode_chat(tokenizer, chat)) <= len(rendered) + 1


def test_a_prompt_is_measured_as_an_episode_measures_it(tmp_path: Path) -> None:
    for length, outcome in ((LIMIT, None), (LIMIT + 1, "error")):
        episode = Episode(task(0), 0, Limits.of(config(tmp_path, "?")), build_tokenizer())
        episode.start((Message("user", of_length(length)),), ())
        assert episode.outcome == outcome
