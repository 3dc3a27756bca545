"""Agents of real clients, for .venv-agents: what the examples do not show, and all of them in turn."""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import Any

EXAMPLES = ("openai_sdk", "openai_responses", "anthropic_sdk", "openai_agents")


async def every(episode: Any) -> Any:
    """Play with another client for each task, and each API of mini-swe-agent."""
    minis = (mini_chat, mini_responses, mini_messages)
    number = episode.task.index % (len(EXAMPLES) + len(minis))
    if number >= len(EXAMPLES):
        return await minis[number - len(EXAMPLES)](episode)
    return await importlib.import_module(EXAMPLES[number]).agent(episode)


async def chat_agents(episode: Any) -> Any:
    """openai-agents with chat completions."""
    import openai_agents
    from agents import OpenAIChatCompletionsModel

    openai_agents.OpenAIResponsesModel = OpenAIChatCompletionsModel
    return await openai_agents.agent(episode)


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
