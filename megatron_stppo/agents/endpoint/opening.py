"""Opens the environment of a run: that of environment.kind, or the endpoint and the agent."""

import copy
import difflib
import ipaddress
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch.distributed as dist
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tool_parsers import ToolParserManager

from megatron_stppo.agents.endpoint.agents import open_agent
from megatron_stppo.agents.endpoint.environment import AgentEnvironment
from megatron_stppo.agents.endpoint.recorder import ParseTools, Rules
from megatron_stppo.agents.endpoint.server import Endpoint
from megatron_stppo.base.printing import one_line
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.text.conversation import encode_after
from megatron_stppo.environments import choose
from megatron_stppo.environments.base import AnyEnvironment
from megatron_stppo.observe.console import say
from megatron_stppo.rollout.episodes.collect import open_together
from megatron_stppo.rollout.vllm.vllm_setup import end_of_text_ids
from megatron_stppo.weights.sharding.hf_load import load_config, load_tokenizer


def open_environment(config: Config, resume: bool) -> Callable[[], AnyEnvironment]:
    """Return a function that makes the environment of one episode. Collective.

    For an agent, the first rank of each engine listens at environment.agents_address. `resume` and the
    errors are those of open_together.
    """
    section = config.environment

    def make() -> Callable[[], AnyEnvironment]:
        if section.kind == choose.AGENT:
            return _agents(config)
        if section.after_end == "message":
            path = config.model.path
            tokenizer = load_tokenizer(path, config.model.template_arguments)
            _check_template(tokenizer, end_of_text_ids(path, load_config(path), tokenizer))
        return choose.factory(section)

    return open_together(make, section, resume)


def _check_template(tokenizer: Any, ends: Collection[int]) -> None:
    """Raise ConfigError for a chat template with which no conversation can be continued."""
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    encode_after(tokenizer, chat, None, 1, -1, ends)


def _agents(config: Config) -> Callable[[], AnyEnvironment]:
    section, path = config.environment, config.model.path
    agent = open_agent(section)
    model = load_config(path)
    tokenizer = _tokenizer(load_tokenizer(path, config.model.template_arguments))
    rules = Rules(
        tokenizer,
        end_of_text_ids(path, model, tokenizer),
        int(model.vocab_size),
        config.max_context,
        section.max_turns,
        _parser(section.tool_parser, tokenizer),
    )
    _check_template(tokenizer, rules.ends)
    if dist.get_rank() % config.engine_tensor:
        return _unused
    name, address = path.name or "policy", section.agents_address
    endpoint = Endpoint(name, config.max_context, rules.parser is not None, address=address)
    try:
        endpoint.start()
    except RuntimeError as error:
        raise ConfigError(
            f"environment.kind=agent: {error}; free file descriptors of this machine"
        ) from error
    _reach_without_proxy(endpoint.host)
    if warning := _unencrypted(address, endpoint.host, endpoint.port):
        say(warning)
    return partial(AgentEnvironment, agent, endpoint, rules)


def _reach_without_proxy(host: str) -> None:
    """Add the host to the variables that name what HTTP clients reach without a proxy.

    Agents in this process, and their commands, inherit them. A proxy would get their prompts and keys. "*",
    which names everything, is left alone: clients understand it only by itself.
    """
    names = ("NO_PROXY", "no_proxy")
    known = [place.strip() for name in names for place in os.environ.get(name, "").split(",")]
    every = ["*"] if "*" in known else filter(None, [*known, host])
    os.environ.update(dict.fromkeys(names, ",".join(dict.fromkeys(every))))


def _unencrypted(address: str, host: str, port: int) -> str:
    """Return a warning if other machines can reach the endpoint, else an empty text."""
    if ipaddress.ip_address(host).is_loopback:
        return ""
    return (
        f"environment.agents_address={one_line(address)}: agents connect to {host}:{port} over plain HTTP, "
        "which does not encrypt texts and keys; outside a private network use an SSH tunnel or a TLS proxy "
        "(docs/agents.md)"
    )


def _tokenizer(loaded: Any) -> Any:
    """Return a copy of the tokenizer for the thread of the episodes, which computes its vocabulary once.

    It is not the engine's, which another thread uses: encoding changes a setting inside. Some of vLLM's
    parsers (llama3_json) ask for the vocabulary at every completion, and transformers takes 0.1 s to list
    150,000 entries.
    """
    return get_cached_tokenizer(copy.deepcopy(loaded))


def _parser(name: str | None, tokenizer: Any) -> ParseTools | None:
    """Return vLLM's parser. Raises ConfigError for one that does not work with the model's tokenizer.

    A parser that the tokenizer lacks tokens for would find no call.
    """
    if name is None:
        return None
    where, known = f"environment.tool_parser={name}", ToolParserManager.list_registered()
    if name not in known:
        near = difflib.get_close_matches(name, known, 3) or known
        raise ConfigError(f"{where}: vLLM has no such parser; choose from {', '.join(near)}")
    try:
        parser = ToolParserManager.get_tool_parser(name)
        parser(tokenizer, None)
    except ImportError as error:  # some parsers need packages that vLLM installs only on a GPU's machine
        raise ConfigError(
            f"{where}: vLLM cannot load it ({one_line(str(error))}); install what it needs, or name another"
        ) from None
    except Exception as error:  # a parser may raise any exception
        raise ConfigError(
            f"{where}: vLLM's parser cannot be used with the tokenizer of model.path "
            f"({one_line(str(error))}); name the parser of this model"
        ) from None
    return parser


def _unused() -> AnyEnvironment:
    raise AssertionError("environments run on the first rank of an engine only")
