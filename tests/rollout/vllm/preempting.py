"""A function that runs on a rank: requests that vLLM preempts while their last token is in flight."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron_stppo.cluster.launch import process
from tests.rollout.vllm.tiny import CONTEXT

PROMPTS = {"length": tuple(range(3, 43)), "stop": tuple(range(60, 99))}


def preempted_at_the_end(folder: Path) -> dict[str, list[tuple[tuple[int, ...], bytes]]]:
    """Return {request: [(tokens, experts) of an undisturbed run, of a run in which it is preempted]}.

    Scheduling is asynchronous, as on a GPU. When the step of a request's last token is under way, the request
    loses its blocks, and other experts overwrite theirs. vLLM still delivers the token. It ends the request
    "length", and a stop string, which vLLM does not get, ends the request "stop".
    """
    process.prepare()
    import torch

    from megatron_stppo.rollout.vllm.engine import Engine, EngineSettings
    from tests.rollout.vllm.test_async_steps import schedule_asynchronously

    torch.set_num_threads(1)
    schedule_asynchronously()
    engine = Engine(
        EngineSettings(folder, max_context=CONTEXT, max_sequences=4, kv_cache_gib=0.05, routes=True)
    )
    generator = torch.Generator().manual_seed(0)
    for name, weight in engine.parameters().items():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1 + ("norm" in name))
    engine.published = lambda: 1

    def play() -> dict[str, tuple[tuple[int, ...], bytes]]:
        engine.refresh()
        engine.add("length", PROMPTS["length"], seed=1, max_tokens=6)
        engine.add("stop", PROMPTS["stop"], seed=2, max_tokens=60, stop_strings=("a", "e", "i", "o", "t"))
        found = []
        while engine.unfinished:
            found += engine.step()
        assert {one.request_id: one.reason for one in found} == {"length": "length", "stop": "stop"}
        return {one.request_id: (one.token_ids, one.routes) for one in found}

    undisturbed = play()
    scheduler, routes = engine._core.engine_core.scheduler, engine._routes
    schedule, left = scheduler.schedule, dict.fromkeys(PROMPTS, 1)

    def preempting(*args: Any, **options: Any) -> Any:
        for request in list(scheduler.running):
            name = request.request_id.partition("/")[0]
            last = len(undisturbed[name][0]) - 1
            if left[name] and request.num_in_flight_tokens and request.num_output_tokens == last:
                left[name] = 0
                blocks = routes._blocks(request.request_id)
                scheduler.running.remove(request)
                scheduler._preempt_request(request, time.monotonic())
                for block in blocks:
                    routes._of_slot[block * routes._block : (block + 1) * routes._block] = 0
        return schedule(*args, **options)

    scheduler.schedule = preempting
    disturbed = play()
    assert not any(left.values()), f"not preempted: {left}"
    return {name: [undisturbed[name], disturbed[name]] for name in PROMPTS}
