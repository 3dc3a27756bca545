"""An agent of OpenAI's SDK with one tool, which uses the Responses API. Each request has all items.

PYTHONPATH=examples/agents megatron-stppo train CONFIG environment.kind=agent \
    environment.agent=openai_responses:agent environment.tool_parser=hermes
"""

from typing import Any

from openai import AsyncOpenAI
from openai_sdk import TOOL, look_up

FUNCTION: Any = {"type": "function", "strict": False, **TOOL["function"]}


async def agent(episode: Any) -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": episode.task.prompt[-1].content}]
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        for _turn in range(3):
            reply = await client.responses.create(model=episode.model, input=items, tools=[FUNCTION])
            items += [item.model_dump(exclude_none=True) for item in reply.output]
            calls = [item for item in reply.output if item.type == "function_call"]
            for call in calls:
                output = look_up(call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
            if not calls:
                break
    said = reply.output_text
    return {"reward": float(any(target in said for target in episode.task.targets)), "detail": said}
