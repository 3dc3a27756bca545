"""vLLM's CPU worker, with a shared-memory name of its own per engine.

vLLM derives the name of its CPU all-reduce buffers from the rendezvous address and always calls it "env://"
under an external launcher, so two runs on one host, or a run and what a killed one left behind, would
open each other's buffers. The engine passes a token that all its ranks share; it becomes part of the name.
vLLM imports this module by name (`worker_cls`).
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

TOKEN = "shared_memory_token"


class NamedCPUWorker(CPUWorker):
    def init_device(self) -> None:
        # What follows the last ":" becomes the name; the default process group exists, so nothing dials it.
        given = self.vllm_config.additional_config
        assert isinstance(given, dict)
        self.distributed_init_method = f"env://:{given[TOKEN]}"
        super().init_device()
