"""Agents of real clients, for .venv-agents: what the examples do not show, and all of them in turn."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

SURE = {"role": "user", "content": "sure?"}


async def every(episode: Any) -> Any:
    """Play with another client for each task."""
    clients = (responses, anthropic, agents, mini_chat, mini_responses, mini_messages)
    return await clients[episode.task.index % len(clients)](episode)


async def harnesses(episode: Any) -> Any:
    """Play with another harness for each task: Claude Code, Codex or OpenHands."""
    name = ("claude_code", "codex", "openhands")[episode.task.index % 3]
    if name != "openhands":
        return await importlib.import_module(name).agent(episode)
    command = ["-m", "megatron_stppo.agents.command", "openhands_sdk:agent"]
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.prefix).with_name(".venv-openhands") / "bin" / "python"),
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate(os.environ["MEGATRON_STPPO_TASK"].encode())
    return json.loads(out.decode().splitlines()[-1])


async def responses(episode: Any) -> dict[str, Any]:
    """OpenAI's SDK with the Responses API: one question as an object, one as a stream."""
    from openai import AsyncOpenAI

    items: list[Any] = [message.as_dict() for message in episode.task.prompt]
    given: Any = {"model": episode.model, "input": items, "reasoning": {"effort": "low"}}
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        reply = await client.responses.create(**given)
        items += [*(item.model_dump(exclude_none=True) for item in reply.output), SURE]
        *_, last = [event async for event in await client.responses.create(**given, stream=True)]
    return {"reward": len(last.response.output_text) % 8 / 8, "detail": last.type}


async def anthropic(episode: Any) -> dict[str, Any]:
    """Anthropic's SDK: one question as an object, one as a stream whose tokens are counted before."""
    from anthropic import AsyncAnthropic

    messages: list[Any] = [message.as_dict() for message in episode.task.prompt]
    asked: Any = {"model": episode.model, "messages": messages, "thinking": {"type": "adaptive"}}
    given: Any = asked | {"max_tokens": 5000}
    async with AsyncAnthropic(base_url=episode.anthropic_base_url, api_key=episode.api_key) as client:
        reply = await client.messages.create(**given)
        messages += [{"role": "assistant", "content": reply.content}, SURE]
        counted = (await client.messages.count_tokens(**asked)).input_tokens
        async with client.messages.stream(**given) as stream:
            last = await stream.get_final_message()
    assert counted == last.usage.input_tokens, (counted, last.usage)
    return {"reward": last.usage.output_tokens / 8, "detail": str(last.stop_reason)}


async def agents(episode: Any) -> dict[str, Any]:
    """openai-agents, which sends its own items again with the second question."""
    from agents import Agent, OpenAIResponsesModel, RunConfig, Runner
    from openai import AsyncOpenAI

    quiet = RunConfig(tracing_disabled=True)
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        model = OpenAIResponsesModel(model=episode.model, openai_client=client)
        one: Any = Agent("one", instructions="Be brief.", model=model)
        first = await Runner.run(one, episode.task.prompt[-1].content, run_config=quiet)
        second = await Runner.run(one, [*first.to_input_list(), SURE], run_config=quiet)
    return {"reward": len(str(second.final_output)) % 8 / 8, "detail": "two runs"}


async def chat_agents(episode: Any) -> Any:
    """openai-agents with chat completions."""
    import openai_agents
    from agents import OpenAIChatCompletionsModel

    openai_agents.OpenAIResponsesModel = OpenAIChatCompletionsModel
    return await openai_agents.agent(episode)


async def codex_with_mcp(episode: Any) -> Any:
    """Codex with a server of MCP, for which it waits before its first request."""
    import codex

    given = {
        "command": sys.executable,
        "args": [str(Path(codex.__file__).with_name("mcp_server.py"))],
        "required": True,
        "startup_timeout_sec": 100,
        "default_tools_approval_mode": "approve",
    }
    place = "mcp_servers.capitals"
    return await codex.agent(episode, **{f"{place}.{key}": value for key, value in given.items()})


async def mini_chat(episode: Any) -> Any:
    return await _mini(episode, "litellm_model:LitellmModel", f"openai/{episode.model}", episode.base_url)


async def mini_responses(episode: Any) -> Any:
    kind = "litellm_response_model:LitellmResponseModel"
    return await _mini(episode, kind, f"openai/{episode.model}", episode.base_url)


async def mini_messages(episode: Any) -> Any:
    kind, url = "litellm_model:LitellmModel", episode.anthropic_base_url
    return await _mini(episode, kind, f"anthropic/{episode.model}", url)


async def _mini(episode: Any, kind: str, name: str, url: str) -> Any:
    """Play with mini-swe-agent. Without a sandbox: the policy of these tests writes nothing but `echo`."""
    import mini_swe_agent
    from minisweagent.environments.local import LocalEnvironment

    module, _, name_of_class = kind.partition(":")
    model_class = getattr(importlib.import_module(f"minisweagent.models.{module}"), name_of_class)
    endpoint = {"api_base": url, "api_key": episode.api_key}
    model = model_class(model_name=name, model_kwargs=endpoint, cost_tracking="ignore_errors")
    sandbox = LocalEnvironment(cwd=os.environ.get("TMPDIR", "/tmp"))
    return await asyncio.to_thread(mini_swe_agent.play, episode, model, sandbox)
