"""An agent of the package openai-agents with one tool. It uses the package's default, the Responses API.

PYTHONPATH=.:examples/agents megatron-stppo train CONFIG environment.kind=agent \
    environment.tool_parser=hermes 'environment.command=[.venv-agents/bin/python,
    -m, megatron_stppo.agents.command, "openai_agents:agent"]'
"""

from typing import Any

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

CAPITALS = {"France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Peru": "Lima", "Ghana": "Accra"}


@function_tool
def capital(country: str) -> str:
    """Look up the capital of a country."""
    return CAPITALS.get(country, "unknown")


async def agent(episode: Any) -> dict[str, Any]:
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        model = OpenAIResponsesModel(model=episode.model, openai_client=client)
        geographer: Agent[Any] = Agent(
            "geographer", instructions="Use the tool.", tools=[capital], model=model
        )
        question = episode.task.prompt[-1].content
        quiet = RunConfig(tracing_disabled=True)  # else it sends traces to a hosted service
        result = await Runner.run(geographer, question, max_turns=3, run_config=quiet)
    said = str(result.final_output)
    return {"reward": float(any(target in said for target in episode.task.targets)), "detail": said}
