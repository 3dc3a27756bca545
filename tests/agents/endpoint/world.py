"""The process in which the claims about the endpoint run: it has imported vLLM, and has one engine.

Claims are functions test_* of the files claims_*.py. Each gets a World. They run in one process because vLLM
takes seconds to import; test_claims.py reports each of them as a test.
"""

from __future__ import annotations

import copy
import importlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_stppo.base.types import Task, Trajectory
from megatron_stppo.rollout.episodes.collect import RolloutSettings, collect
from megatron_stppo.rollout.episodes.episode import Limits
from tests.rollout.vllm.tiny import CONTEXT, fill, task

LIMITS = Limits(max_prompt_tokens=60, max_turn_tokens=8, max_observation_tokens=30, max_context=CONTEXT)
SEED = 11
SKIPPED = "skipped: "


@dataclass
class World:
    engine: Any
    reference: Any  # the same model in transformers
    rules: Any  # endpoint.recorder.Rules
    endpoint: Any  # endpoint.server.Endpoint
    tasks: Sequence[Task] = (task(0),)

    def play(self, agent: Any, **given: Any) -> list[Trajectory]:
        """Play an episode of each task with the agent. given: of RolloutSettings."""
        from megatron_stppo.agents.endpoint.environment import AgentEnvironment

        return self.collect(lambda: AgentEnvironment(agent, self.endpoint, self.rules), **given)

    def collect(self, make: Any, **given: Any) -> list[Trajectory]:
        settings = RolloutSettings(LIMITS, **{"deadline": 10.0} | given)
        engine = self.engine
        return collect(engine, self.tasks, make, settings, SEED)


def reference(folder: Path) -> Any:
    """Return the model in transformers, float32.

    from_pretrained leaves the frequencies of the rotary embedding uninitialised where the CPU platform of
    cluster/launch/process.py stands in for CUDA, as in ranks of tests.
    """
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder)).float().eval()
    load_model(model, folder / "model.safetensors")
    return model


def observe(folder: Path, claims: Sequence[str]) -> dict[str, str]:
    """Return {claim: traceback, SKIPPED with a reason, or "" if it holds} of the claims FILE:FUNCTION."""
    from vllm.tool_parsers import ToolParserManager

    from megatron_stppo.agents.endpoint.recorder import Rules
    from megatron_stppo.agents.endpoint.server import Endpoint
    from megatron_stppo.rollout.vllm.engine import Engine, EngineSettings

    parser = ToolParserManager.get_tool_parser("hermes")
    engine = Engine(EngineSettings(folder, max_context=CONTEXT, max_sequences=16, kv_cache_gib=0.05))
    fill(engine.parameters(), folder)
    engine.published = lambda: 3
    engine.refresh()
    tokenizer = copy.deepcopy(engine.tokenizer)
    world = World(
        engine,
        reference(folder),
        Rules(
            tokenizer, [tokenizer.eos_token_id], engine.vocabulary, CONTEXT, max_completions=6, parser=parser
        ),
        Endpoint("tiny", CONTEXT, has_parser=True).start(),
    )
    found = {}
    for claim in claims:
        module, _, name = claim.partition(":")
        try:
            getattr(importlib.import_module(f"tests.agents.endpoint.{module}"), name)(copy.copy(world))
            found[claim] = ""
        except pytest.skip.Exception as skipped:
            found[claim] = f"{SKIPPED}{skipped}"
        except Exception:
            found[claim] = traceback.format_exc()
    world.endpoint.close()
    engine.close()
    return found
