"""vLLM's CPU worker with a different shared-memory name for every engine, and without memory binding.

vLLM derives the name of its CPU all-reduce buffers from the rendezvous address. Under an external launcher
this address is always "env://", so two runs on one host would open each other's buffers; so would a run and
the buffers left by a killed run. The engine therefore passes a token that is the same on all its ranks, and
the token becomes part of the name.

vLLM binds the memory of its process to one NUMA node, and warns of it. In this process are the trainer's
models too, for which one node may be too small, and its threads are not bound either
(VLLM_CPU_OMP_THREADS_BIND=nobind). vLLM imports this module by name (`worker_cls`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_stppo.rollout.vllm.engine_routes import EngineRoutes

TOKEN, ROUTES = "shared_memory_token", "routes"


class NamedCPUWorker(CPUWorker):
    def __init__(self, *given: Any, **named: Any) -> None:
        bind = torch.ops._C.init_cpu_memory_env
        setattr(torch.ops._C, "init_cpu_memory_env", lambda nodes: None)  # noqa: B010
        try:
            super().__init__(*given, **named)
        finally:
            setattr(torch.ops._C, "init_cpu_memory_env", bind)  # noqa: B010

    def init_device(self) -> None:
        # vLLM uses the text after the last ":" as the name. The default process group already exists, so
        # nothing connects to this address.
        given = self.vllm_config.additional_config
        assert isinstance(given, dict)
        self.distributed_init_method = f"env://:{given[TOKEN]}"
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        given = self.vllm_config.additional_config
        assert isinstance(given, dict)
        if given[ROUTES]:
            self.routes = EngineRoutes(self)
        return super().compile_or_warm_up_model()
