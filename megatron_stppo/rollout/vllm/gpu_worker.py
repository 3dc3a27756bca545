"""vLLM's GPU worker with two changes. vLLM imports this module by name (`worker_cls`)."""

import logging
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from megatron_stppo.rollout.vllm.engine_routes import EngineRoutes

log = logging.getLogger(__name__)


class SharingWorker(Worker):
    """A worker on a GPU that other processes may use too."""

    def sleep(self, level: int = 1) -> None:
        """Release memory. vLLM compares the device's free memory before and after, and another process may
        have taken some in the meantime; vLLM's error then comes after the release, and becomes a warning."""
        try:
            super().sleep(level)
        except AssertionError as error:
            if "Memory usage increased" not in str(error):
                raise
            log.warning(
                "the engine sleeps, but less of the GPU's memory is free than before: another process has "
                "taken some in the meantime, or vLLM has not released it"
            )


class RecordingWorker(SharingWorker):
    """It also records the experts that its routers choose (engine_routes.py). It has not run on a GPU."""

    def compile_or_warm_up_model(self) -> Any:
        self.routes = EngineRoutes(self)  # before CUDA graphs are captured
        return super().compile_or_warm_up_model()
