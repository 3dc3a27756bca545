"""The experts that the engine chose, stored beside its key-value cache (Routing Replay R3).

A token's experts are stored under the slot of its keys and values. A token that comes from the prefix cache,
in a later turn or in another request with the same beginning, therefore has the experts of the pass that
computed its keys and values. A token that is computed again after a preemption has those of the last pass.
The weights therefore may not change while requests are running (Engine.refresh).

vLLM can return the experts itself (enable_return_routed_experts). This is not used: it needs vLLM's second
model runner, which a CPU does not have, and it returns them on the first rank of an engine only. On the other
ranks the scheduler, which runs on every rank under an external launcher, raises an error. Only the hook of
that feature is used: vLLM's routers pass the experts that they chose to a function.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from megatron_stppo.data.routes import dtype_of, unknown
from megatron_stppo.rollout.vllm.generation import RolloutError


class EngineRoutes:
    """The experts of all tokens in the key-value cache of one rank's engine."""

    def __init__(self, worker: Any) -> None:
        """Attach to the routers of a vLLM worker whose key-value cache is allocated.

        On a GPU this must happen before CUDA graphs are captured, because they contain the copies.
        """
        runner, config = worker.model_runner, worker.model_config
        # One group has the keys and values of all tokens; others have those of a window, or states.
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        parts = MambaSpec | SlidingWindowSpec
        whole = [n for n, spec in enumerate(specs) if not isinstance(spec, parts)]
        if not whole:
            raise RolloutError(
                "no layer keeps the keys and values of all tokens, beside which experts are kept"
            )
        (self._group,) = whole
        self._block = int(specs[self._group].block_size)
        dtype = dtype_of(config.get_num_experts())
        self._unknown = unknown(dtype)
        modules = worker.get_model().modules()
        self.routers = [module.router for module in modules if isinstance(module, MoERunner)]
        slots = runner.kv_cache_config.num_blocks * self._block
        # One row more than slots: dummy tokens have slot -1, which is the last row.
        shape = (slots + 1, len(self.routers), config.get_num_experts_per_tok())
        self._of_slot = torch.full(shape, self._unknown, dtype=dtype, device=worker.device)
        if hasattr(runner, "block_tables"):  # vLLM's second model runner
            self._slots = runner.block_tables.slot_mappings[self._group]
        else:
            self._slots = runner.input_batch.block_table[self._group].slot_mapping.gpu
        for layer, router in enumerate(self.routers):
            router.set_capture_fn(partial(self._store, layer))
        # by vLLM's id: blocks of ended requests, and the experts of preempted ones in host memory
        self._freed: dict[str, list[int]] = {}
        self._preempted: dict[str, Tensor] = {}
        self._manager: Any = None

    def follow(self, client: Any) -> None:
        """Note the blocks of a request when vLLM's scheduler frees them, which may be before `read`.

        With asynchronous scheduling vLLM may preempt a request whose last token is in flight. The step that
        is being scheduled then overwrites its blocks before the token arrives. So the experts are copied,
        after the step in flight and before the next one.
        """
        scheduler = client.engine_core.scheduler
        self._manager, free = scheduler.kv_cache_manager, scheduler._free_request_blocks

        def noting(request: Any) -> None:
            key = request.request_id
            if request.is_finished():
                self._freed[key] = self._blocks(key)
            elif request.num_in_flight_tokens:
                self._preempted[key] = self._rows(self._blocks(key)).cpu()
            free(request)

        scheduler._free_request_blocks = noting

    def read(self, request_id: str, tokens: int) -> bytes:
        """Return the experts of the first tokens of a request: [tokens, layers, k] in C order.

        Call this before the engine's next step, which may overwrite the blocks of a request that has ended.
        Raises RolloutError if the experts of a token are unknown.
        """
        freed, copy = self._freed.pop(request_id, []), self._preempted.pop(request_id, None)
        blocks = self._blocks(request_id) or freed
        rows = self._rows(blocks)[:tokens].cpu() if blocks or copy is None else copy[:tokens]
        if len(rows) < tokens or bool((rows == self._unknown).any()):
            raise RolloutError(
                f"algorithm.routing_replay=rollout: vLLM reported no experts for some of the {tokens} tokens "
                f"of request {request_id}; set it to old_policy or off"
            )
        return rows.numpy().tobytes()

    def clear(self) -> None:
        """Forget all experts, when the prefix cache is dropped."""
        self._of_slot.fill_(self._unknown)
        self._freed.clear()
        self._preempted.clear()

    def _store(self, layer: int, chosen: Tensor) -> None:
        self._of_slot[:, layer][self._slots[: len(chosen)]] = chosen.to(self._of_slot.dtype)

    def _blocks(self, request_id: str) -> list[int]:
        blocks: list[int] = self._manager.get_block_ids(request_id)[self._group]
        return blocks

    def _rows(self, blocks: list[int]) -> Tensor:
        """Return a copy of the experts of all tokens of these blocks: [tokens, layers, k]."""
        first = torch.tensor(blocks, dtype=torch.int64)[:, None] * self._block
        slots = (first + torch.arange(self._block)).flatten()
        return self._of_slot[slots.to(self._of_slot.device)]
