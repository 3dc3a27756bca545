"""The agent: it moves a ball between three boxes with two tools, and calls its model over plain HTTP.

The loop is that of any agent of a hosted model. Training gives it the base URL and the key.
"""

import json
import ssl
from typing import Any

import httpx

BOXES = ("a", "b", "c")
MOST_COMPLETIONS = 4  # also environment.max_turns
CERTIFICATES = ssl.create_default_context()  # reading them for every episode would take longer than a turn


def tool(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"box": {"type": "string"}}, "required": ["box"]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("take", "Take the ball out of a box."), tool("put", "Put the ball into a box.")]


class Room:
    """The place of the ball: a box, or "" in the agent's hand."""

    def __init__(self, ball: str) -> None:
        self.ball = ball

    def use(self, name: str, arguments: str) -> str:
        """Call a tool, and return its result. The policy may write anything."""
        try:
            box = json.loads(arguments)["box"]
        except (ValueError, KeyError, TypeError):
            return "no box"
        if name == "take" and box == self.ball:
            self.ball = ""
        elif name == "put" and box in BOXES and not self.ball:
            self.ball = box
        else:
            return "nothing happens"
        return "ok"


def reward(ball: str, target: str) -> float:
    """The reward of an episode that is over. To train something else, change this function alone."""
    return float(ball == target)


async def agent(episode: Any) -> dict[str, Any]:
    """What `environment.agent: agent:agent` names; called once per episode."""
    messages: list[dict[str, Any]] = [message.as_dict() for message in episode.task.prompt]
    room, calls = Room(episode.task.extra["ball"]), 0
    key = {"Authorization": f"Bearer {episode.api_key}"}
    async with httpx.AsyncClient(
        base_url=episode.base_url, headers=key, timeout=None, verify=CERTIFICATES
    ) as client:
        for _ in range(MOST_COMPLETIONS):
            request = {"model": episode.model, "messages": messages, "tools": TOOLS}
            reply = await client.post("/chat/completions", json=request)
            reply.raise_for_status()
            message = reply.json()["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls") or ():
                result = room.use(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                calls += 1
            if not message.get("tool_calls"):
                break
    return {
        "reward": reward(room.ball, episode.task.targets[0]),
        "detail": f"the ball is in {room.ball or 'the hand'}",
        "calls": calls,  # metrics.jsonl gets the mean as environment/calls
    }
