"""A policy that answers with given texts, through the real endpoint, without an engine.

It plays the agents of other packages, which run as commands in the environments where these are installed.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from tests.data.text.test_conversation import END, TOKENIZER

ROOT = Path(__file__).parents[3]
PATHS = os.pathsep.join(
    map(str, (ROOT, ROOT / "examples" / "agents", ROOT / "tests" / "agents" / "packages"))
)


@dataclass(frozen=True)
class Play:
    """An episode to play. Example: Play(".venv/bin/python", "openai_sdk:agent", ("Paris",))."""

    python: str
    agent: str
    says: tuple[str, ...]  # the completions
    extra: tuple[tuple[str, Any], ...] = ()  # of the task


@dataclass(frozen=True)
class Seen:
    """What came of it. read: per completion, the text of the tokens that were new before it."""

    read: tuple[str, ...]
    histories: tuple[int, ...]
    outcome: str
    reward: float
    detail: str
    metrics: dict[str, float]  # those of the agent


def play_all(plays: dict[str, Play]) -> dict[str, Seen | str]:
    """Play one episode after the other, in a process that may import vLLM. A failure is its traceback."""
    from vllm.tool_parsers import ToolParserManager

    from megatron_stppo.agents.endpoint.recorder import Rules
    from megatron_stppo.agents.endpoint.server import Endpoint

    os.environ["PYTHONPATH"] = PATHS
    parser = ToolParserManager.get_tool_parser("hermes")
    rules = Rules(TOKENIZER, [END], len(TOKENIZER), 40000, max_completions=6, parser=parser)
    endpoint = Endpoint("tiny", 40000, has_parser=True).start()
    try:
        return {name: _seen(play, endpoint, rules) for name, play in plays.items()}
    finally:
        endpoint.close()


def _seen(play: Play, endpoint: Any, rules: Any) -> Seen | str:
    try:
        return asyncio.run(_play(play, endpoint, rules))
    except Exception:
        return traceback.format_exc()


async def _play(play: Play, endpoint: Any, rules: Any) -> Seen:
    from megatron_stppo.agents.endpoint.agents import open_agent
    from megatron_stppo.agents.endpoint.environment import AgentEnvironment
    from megatron_stppo.environments.base import Completion

    command = [play.python, "-m", "megatron_stppo.agents.command", play.agent]
    environment = AgentEnvironment(
        open_agent(EnvironmentConfig(kind="agent", command=command)), endpoint, rules
    )
    question = Message("user", "What is the capital of France?")
    task = Task("capitals", (question,), ("Paris",), "train", 0, dict(play.extra))
    read, histories = [], []
    try:
        async with asyncio.timeout(200):
            request = await environment.reset(task, seed=5)
            for text in play.says:
                read.append(TOKENIZER.decode(request.token_ids))
                histories.append(request.history)
                ids = (*TOKENIZER.encode(text), END)
                result = await environment.complete(Completion(text, ids, (-0.5,) * len(ids), "end"))
                if result.done:
                    break
                request = result.request
    finally:
        await environment.close()
    assert result.done, f"the agent asks again: {read}"
    own = {name: value for name, value in result.metrics.items() if not name.startswith("endpoint/")}
    return Seen(tuple(read), tuple(histories), result.outcome, result.reward, result.detail, own)
