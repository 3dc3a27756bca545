"""An agent that gets its tools from an MCP server, here a program of its own that talks over a pipe.

PYTHONPATH=.:examples/agents megatron-stppo train CONFIG environment.kind=agent \
    environment.tool_parser=hermes 'environment.command=[.venv-agents/bin/python,
    -m, megatron_stppo.agents.command, "mcp_tools:agent"]'
"""

import json
import sys
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client
from openai import AsyncOpenAI

SERVER = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).with_name("mcp_server.py"))])


def as_function(tool: Any) -> Any:
    named = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": named}


async def call(tools: Any, name: str, arguments: str) -> str:
    try:
        result = await tools.call_tool(name, json.loads(arguments))
    except Exception as error:  # the policy may write anything
        return f"error: {error}"
    return "\n".join(part.text for part in result.content if part.type == "text")


async def agent(episode: Any) -> dict[str, Any]:
    messages: list[Any] = [m.as_dict() for m in episode.task.prompt]
    async with (
        Client(stdio_client(SERVER)) as tools,
        AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client,
    ):
        listed = [as_function(tool) for tool in (await tools.list_tools()).tools]
        for _turn in range(3):
            reply = await client.chat.completions.create(model=episode.model, messages=messages, tools=listed)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for wanted in message.tool_calls or ():
                content = await call(tools, wanted.function.name, wanted.function.arguments)
                messages.append({"role": "tool", "tool_call_id": wanted.id, "content": content})
            if not message.tool_calls:
                break
    right = any(target in (message.content or "") for target in episode.task.targets)
    return {"reward": float(right), "detail": message.content or ""}
