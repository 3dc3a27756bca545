"""An agent for whole runs, environment.agent=tests.agents.endpoint.played:agent.

It asks twice in one conversation. For tasks with odd numbers it then edits its second message, which begins a
second history. The reward depends on the length of what the policy wrote, so that rewards vary.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def agent(episode: Any) -> dict[str, float]:
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:

        async def say(messages: list[Any]) -> str:
            answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=6)
            return answer.choices[0].message.content or ""

        messages: list[Any] = [{"role": m.role, "content": m.content} for m in episode.task.prompt]
        first = await say(messages)
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "sure?"}]
        said = await say(messages)
        if episode.task.index % 2:
            messages[-1]["content"] = "are you sure?"
            said += await say(messages)
    return {"reward": len(said) % 8 / 8, "letters": len(said)}
