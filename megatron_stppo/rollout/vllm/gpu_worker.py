"""vLLM's GPU worker, which records the experts that its routers choose. It has not run on a GPU.

vLLM imports this module by name (`worker_cls`).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from megatron_stppo.rollout.vllm.engine_routes import EngineRoutes


class RecordingWorker(Worker):
    def compile_or_warm_up_model(self) -> Any:
        self.routes = EngineRoutes(self)  # before CUDA graphs are captured
        return super().compile_or_warm_up_model()
