"""A geography assistant with one tool, as it is written for a hosted model.

    export OPENAI_API_KEY=...
    python examples/hosted_agent/geographer.py "Name the capital of Gabon."

The client of OpenAI's SDK finds its model at OPENAI_BASE_URL, and at the hosted service if that is not set.
Training sets it, and changes nothing in this file.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

FACTS = Path(os.environ.get("FACTS", "runs/hosted-agent/data/facts.json"))
MODEL = os.environ.get("MODEL", "gpt-4o-mini")
MOST_CALLS = 2
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a fact about a country or a chemical element.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "such as: capital of Gabon"}},
            "required": ["query"],
        },
    },
}


def look_up(facts: dict[str, str], arguments: str) -> str:
    try:
        return facts[json.loads(arguments)["query"]]
    except (ValueError, KeyError, TypeError):  # the model may write anything
        return "nothing found"


def answer(question: str) -> str:
    """Return the assistant's answer, or "" if it only calls tools."""
    client, facts = OpenAI(), json.loads(FACTS.read_text(encoding="utf-8"))
    messages: list[Any] = [{"role": "user", "content": question}]
    for _turn in range(MOST_CALLS + 1):
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            content = look_up(facts, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return ""


if __name__ == "__main__":
    print(answer(sys.argv[1]).strip())
