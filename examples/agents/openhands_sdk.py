"""OpenHands with its terminal; install it with `make .venv-openhands`.

PYTHONPATH=.:examples/agents megatron-stppo train CONFIG environment.kind=agent \
    environment.tool_parser=hermes 'environment.command=[.venv-openhands/bin/python,
    -m, megatron_stppo.agents.command, "openhands_sdk:agent"]'

The commands are the policy's, and OpenHands runs them without a sandbox: put one before
.venv-openhands/bin/python (docs/agents.md).
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from typing import Any

os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no request to the internet
    "OPENHANDS_SUPPRESS_BANNER": "1",
}

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.tools.terminal import TerminalTool


def play(episode: Any) -> dict[str, Any]:
    """Play until the policy answers without a call, or calls `finish`."""
    name = f"openai/{episode.model}"  # litellm's name of a server with OpenAI's API
    model = LLM(model=name, base_url=episode.base_url, api_key=episode.api_key, num_retries=0)
    tools = [Tool(name=TerminalTool.name)]
    player = Agent(llm=model, tools=tools, system_prompt="Use the tool.")
    with tempfile.TemporaryDirectory() as work:
        talk = Conversation(agent=player, workspace=work, visualizer=None, max_iteration_per_run=6)
        try:
            talk.send_message(episode.task.prompt[-1].content)
            talk.run()
            said = get_agent_final_response(talk.state.events)
        finally:
            talk.close()
    return {"reward": float(any(target in said for target in episode.task.targets)), "detail": said}


async def agent(episode: Any) -> dict[str, Any]:
    with contextlib.redirect_stdout(sys.stderr):  # what the package prints is no result
        return await asyncio.to_thread(play, episode)
