"""vLLM as on a GPU, without one: functions of torch that importing the engine keeps, and vLLM's settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_stppo.cluster.launch.vllm_environment import check_cuda_functions
from megatron_stppo.config import ConfigError
from megatron_stppo.families.gpt_oss import GptOss
from megatron_stppo.rollout.vllm.vllm_setup import attention_backend

UNCOLLECTED = "import gc; gc.disable()\n"  # the imports take a fifth less time
# Runs in a process of its own, because the platform is chosen once per process. UnspecifiedPlatform is the
# only platform of vLLM besides the CPU's that needs no driver. It would import a build of vLLM's operations
# that needs AVX-512. The CPU's platform imports the build that fits the processor.
IMPORTS = """
import importlib, json, pkgutil
import torch

NAMES = {
    torch: ("Event",),
    torch.cuda: ("Event", "Stream", "stream", "current_stream"),
    torch.accelerator: ("synchronize", "empty_cache", "get_memory_info"),
    torch.Tensor: ("pin_memory", "record_stream"),
}

def functions():
    return [getattr(owner, name) for owner, names in NAMES.items() for name in names]

before = functions()
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import UnspecifiedPlatform

class Platform(UnspecifiedPlatform):
    import_kernels = CpuPlatform.import_kernels

vllm.platforms._current_platform = Platform()
import megatron_stppo.rollout.episodes, megatron_stppo.rollout.vllm
for package in (megatron_stppo.rollout.episodes, megatron_stppo.rollout.vllm):
    for found in pkgutil.iter_modules(package.__path__):
        if found.name != "cpu":  # imported on a CPU only, by vllm_setup
            importlib.import_module(f"{package.__name__}.{found.name}")
replaced = [str(b) for a, b in zip(before, functions()) if a is not b]

from megatron_stppo.rollout.vllm.gpu_worker import SharingWorker, Worker

def fails(text):
    def sleep(self, level):
        raise AssertionError(text)
    return sleep

Worker.sleep = fails("Memory usage increased after sleeping.")
SharingWorker.__new__(SharingWorker).sleep(2)
Worker.sleep = fails("something else")
try:
    SharingWorker.__new__(SharingWorker).sleep(2)
except AssertionError as error:
    replaced += [] if str(error) == "something else" else [str(error)]
else:
    replaced.append("another error is hidden")
print(json.dumps(replaced))
"""


# vLLM's CUDA platform. vLLM's build for CPUs lacks its compiled part and FlashInfer; both are replaced.
CONFIG = """
import sys, types
from pathlib import Path

sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
from tools.cuda_environment import engine, models, stand_ins

stand_ins.install_platform()
import vllm.platforms, vllm.utils.flashinfer

type(vllm.platforms.current_platform).is_cumem_allocator_available = classmethod(lambda platform: True)
vllm.utils.flashinfer.has_flashinfer = lambda: True
print(engine.all_reduce(models.write_config(Path(sys.argv[1]), "qwen3")))
"""


@pytest.mark.long
def test_an_engine_of_several_ranks_does_not_use_flashinfers_all_reduce(tmp_path: Path) -> None:
    assert _printed(CONFIG, str(tmp_path)) == "not FlashInfer's"


def _printed(program: str, *arguments: str) -> str:
    """Run a program in a process of its own. Return the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", UNCOLLECTED + program, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_importing_the_engine_does_not_replace_torch_cuda_unless_the_platform_is_a_cpu() -> None:
    assert json.loads(_printed(IMPORTS)) == [], "replaced"


@pytest.mark.parametrize("gpu", [True, False])
def test_replaced_events_are_refused_if_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    class Event:
        __module__ = "vllm.v1.worker.cpu.shm"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    check_cuda_functions() if torch.version.cuda else None  # torch's own class passes
    monkeypatch.setattr(torch.cuda, "Event", Event)
    if gpu:
        with pytest.raises(ConfigError, match=r"torch\.cuda\.Event is the stand-in of vllm\.v1\.worker\.cpu"):
            check_cuda_functions()
    else:
        check_cuda_functions()


@pytest.mark.parametrize(("major", "backend"), [(9, "FLASH_ATTN"), (10, "TRITON_ATTN")])
def test_attention_reads_sinks_where_the_reshard_writes_them(
    monkeypatch: pytest.MonkeyPatch, major: int, backend: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    assert attention_backend(GptOss.gpu_attention) == backend
