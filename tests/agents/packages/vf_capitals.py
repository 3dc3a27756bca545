"""An environment of the package verifiers: its tasks, its reward and its harness, which asks twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

CAPITALS = {"France": "Paris", "Italy": "Rome"}


class CapitalData(vf.TaskData):
    country: str


class CapitalTask(vf.Task[CapitalData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: Any) -> float:
        return float(CAPITALS[self.data.country] in said(trace)[-1])

    @vf.metric
    async def answers(self, trace: Any) -> float:
        return float(len(said(trace)))


def said(trace: Any) -> list[str]:
    return [str(message.content) for message in trace.assistant_messages]


class CapitalTaskset(vf.Taskset[CapitalTask, vf.TasksetConfig]):
    def load(self) -> Iterable[CapitalTask]:
        for country in CAPITALS:
            prompt = f"What is the capital of {country}?"
            yield CapitalTask(CapitalData(prompt=prompt, country=country), self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for question in ("Are you sure?", None):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append(reply.choices[0].message.model_dump(exclude_none=True))
                if question is not None:
                    messages.append({"role": "user", "content": question})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AskTwice", "CapitalTaskset"]
