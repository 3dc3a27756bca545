"""What is checked before an endpoint for agents opens."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from vllm.tool_parsers import ToolParserManager

from megatron_stppo.agents.endpoint import opening
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.text.conversation import encode_conversation
from megatron_stppo.weights.sharding.hf_load import load_tokenizer
from tests.agents.endpoint.world import World
from tests.data.text.test_conversation import CHAT, TOKENIZER


def test_a_parser_that_would_find_no_call_is_refused(world: World) -> None:
    hermes = ToolParserManager.get_tool_parser("hermes")
    assert opening._parser("hermes", world.rules.tokenizer) is hermes
    try:
        opening._parser("llama3_json", world.rules.tokenizer)
    except ConfigError as error:
        assert str(error).startswith("environment.tool_parser=llama3_json: vLLM's parser cannot be used")
        assert "<|python_tag|>" in str(error)
    else:
        raise AssertionError("not refused: every completion would be text")


def test_a_parser_that_cannot_be_loaded_is_refused(world: World) -> None:
    missing = importlib.util.find_spec("mistral_common") is None
    try:
        opening._parser("qwen3_coder" if missing else "no_such_parser", world.rules.tokenizer)
    except ConfigError as error:
        assert ("vLLM cannot load it (No module named 'mistral_common')" in str(error)) == missing
    else:
        raise AssertionError("not refused")


def write_model(folder: Path) -> None:
    """Write the tokenizer and the shape of a model."""
    TOKENIZER.save_pretrained(folder)
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"), 1)
    shape = {"model_type": "qwen3", "vocab_size": len(TOKENIZER), **sizes}
    (folder / "config.json").write_text(json.dumps(shape))


def test_the_endpoint_listens_at_the_address_of_the_configuration(world: World) -> None:
    given = {"kind": "agent", "command": ["echo"], "agents_address": "127.0.0.2"}
    os.environ |= {"no_proxy": "a.b, ::1", "NO_PROXY": "a.b,c"}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        config = Config.model_validate(
            {"model": {"path": folder}, "environment": given, "rollout": {"engine_tensor": 1}}
        )
        make: Any = opening._agents(config)
    endpoint = make.args[1]
    assert endpoint.host == "127.0.0.2"
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "a.b,c,::1,127.0.0.2"
    os.environ["no_proxy"] = "*"  # not understood in a list
    opening._reach_without_proxy("127.0.0.2")
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "*"
    endpoint.close()


def test_the_vocabulary_is_listed_once_and_not_at_every_completion(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        tokenizer = opening._tokenizer(load_tokenizer(Path(folder)))
    assert tokenizer.get_vocab() is tokenizer.get_vocab() and tokenizer.get_vocab() == TOKENIZER.get_vocab()
    chat = [*CHAT, {"role": "user", "content": "<|im_end|>"}]
    assert encode_conversation(tokenizer, chat) == encode_conversation(TOKENIZER, chat)


def test_a_template_after_which_no_message_can_follow_is_refused_at_the_start(world: World) -> None:
    bare = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer = copy.deepcopy(world.rules.tokenizer)
    opening._check_template(tokenizer, world.rules.ends)
    tokenizer.chat_template = bare
    try:
        opening._check_template(tokenizer, world.rules.ends)
    except ConfigError as error:
        assert "set environment.after_end=text" in str(error)
    else:
        raise AssertionError("not refused: every episode would end in an error")


def test_an_address_that_other_machines_can_reach_is_warned_of_in_one_line(world: World) -> None:
    for host in ("127.0.0.1", "127.0.0.2", "::1"):
        assert opening._unencrypted(host, host, 80) == ""
    for host in ("10.0.0.7", "fe80::1", "192.0.2.1"):
        warning = opening._unencrypted("node\n7", host, 80)
        assert warning.startswith("environment.agents_address=node 7: agents connect to ")
        assert "plain HTTP" in warning and "SSH tunnel" in warning and "\n" not in warning
