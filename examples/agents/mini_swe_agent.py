"""mini-swe-agent, which solves a task with shell commands. Each of them runs in a sandbox of bubblewrap.

PYTHONPATH=.:examples/agents megatron-stppo train CONFIG environment.kind=agent \
    environment.tool_parser=hermes 'environment.command=[.venv-agents/bin/python,
    -m, megatron_stppo.agents.command, "mini_swe_agent:agent"]'

A turn without a call is left out of the conversation by this package, so a new history begins after it.
"""

import asyncio
import contextlib
import os
import sys
from typing import Any

os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}  # no request to the internet

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "Solve the task with the tool bash."
TASK = "{{ task }}\nAt the end run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ANSWER"


def play(episode: Any, model: Any, sandbox: Any) -> dict[str, Any]:
    """Play with a model and an environment of the package. What the package prints is no result."""
    player = DefaultAgent(model, sandbox, system_template=SYSTEM, instance_template=TASK, cost_limit=0)
    with contextlib.redirect_stdout(sys.stderr):
        end = player.run(episode.task.prompt[-1].content)
    said = str(end.get("submission", ""))
    right = any(target in said for target in episode.task.targets)
    return {"reward": float(right), "detail": said or str(end.get("exit_status"))}


async def agent(episode: Any) -> dict[str, Any]:
    endpoint = {"api_base": episode.base_url, "api_key": episode.api_key}
    name = f"openai/{episode.model}"  # litellm's name of a server with OpenAI's API
    model = LitellmModel(model_name=name, model_kwargs=endpoint, cost_tracking="ignore_errors")
    return await asyncio.to_thread(play, episode, model, BubblewrapEnvironment())
