"""Files that transformers refuses, or reads as something that cannot be used, are refused in one line."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_load import load_config, load_generation, load_tokenizer
from tests.broken_inputs.inputs import SHAPE
from tests.data.text.tokenizer_kinds import KINDS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    KINDS["byte level"].save_pretrained(tmp_path)
    change(tmp_path / "config.json", **SHAPE)
    return tmp_path


def change(path: Path, **fields: Any) -> None:
    given = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(given | fields))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"model_max_length": "x"}, "transformers refuses its tokenizer ('>' not supported between"),
        ({"eos_token": 5}, "transformers refuses its tokenizer (Special token eos_token has to be"),
        ({"added_tokens_decoder": []}, "transformers refuses its tokenizer ('list' object has no"),
        ({"tokenizer_class": "LlamaTokenizerFast"}, "does not keep spaces ('a' and then ' a' is decoded as"),
    ],
)
def test_a_tokenizer_is_checked_as_transformers_builds_it(folder: Path, fields: Any, part: str) -> None:
    """transformers builds a LlamaTokenizer from the vocabulary alone; a byte-level one then loses spaces."""
    assert load_tokenizer(folder).encode("a a")
    change(folder / "tokenizer_config.json", **fields)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(folder)
    message = str(caught.value)
    assert message.startswith(f"model.path={folder}: ") and part in message and "\n" not in message


def test_a_token_without_an_embedding_is_refused(folder: Path) -> None:
    size = len(load_tokenizer(folder))
    change(folder / "config.json", vocab_size=size - 1)
    with pytest.raises(ConfigError, match=f"with id {size - 1}, config.json's vocab_size={size - 1} allows"):
        load_tokenizer(folder)


def test_configurations_that_transformers_refuses_are_refused_in_one_line(folder: Path) -> None:
    assert load_generation(folder) is None
    change(folder / "generation_config.json", eos_token_id=[1, 2], pad_token_id="x")
    with pytest.raises(ConfigError, match=r"transformers refuses its generation_config\.json"):
        load_generation(folder)
    change(folder / "generation_config.json", pad_token_id=None)
    given = load_generation(folder)
    assert given is not None and given.eos_token_id == [1, 2]
    change(folder / "config.json", attention_bias=None)
    with pytest.raises(ConfigError, match=r"transformers refuses its config\.json"):
        load_config(folder)


THINKING = (
    "{{ messages[0].content }}{% for m in messages %}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}{{ end }}"
)


def test_arguments_of_the_chat_template_hold_for_every_use_of_the_tokenizer(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(THINKING)
    chat = [{"role": "user", "content": "a"}]

    def shown(arguments: dict[str, bool | int | float | str]) -> str:
        tokenizer = copy.deepcopy(load_tokenizer(folder, arguments))
        return str(tokenizer.apply_chat_template(chat, tokenize=False))

    assert shown({}) == shown({"enable_thinking": True}) == "a"
    assert shown({"enable_thinking": False}) == "a!"
    assert shown({"end": "'é\n{{ 1 }}%}"}) == "a'é\n{{ 1 }}%}", "a text is no template"
    assert shown({"end": 0.5, "enable_thinking": False}) == "a!0.5"
    for name, said in (
        ("enable_thinkin", "no such variable; did you mean enable_thinking?"),
        ("messages", "no such variable"),
        ("a-b", "no such variable"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            load_tokenizer(folder, {name: False})
