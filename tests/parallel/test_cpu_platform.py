"""megatron without a GPU. The contexts of the CPU platform put back what they replace."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from megatron_stppo.parallel import cpu_platform
from tests.ranks import run_ranks


def slow_rank() -> tuple[float, float, int]:
    """Rank 1 enters each of two collectives 0.5 s late; return (seconds waited, seconds in all, waits)."""
    dist.barrier()
    started = time.perf_counter()
    with cpu_platform.timed_waits() as waits:
        for _ in range(2):
            time.sleep(0.5 if dist.get_rank() else 0.0)
            dist.all_reduce(torch.ones(8), async_op=True).wait()
            dist.all_reduce(torch.ones(8))
    seconds = time.perf_counter() - started
    dist.all_reduce(torch.ones(8))  # no longer measured
    return sum(waits), seconds, len(waits)


def test_the_rank_that_others_wait_for_has_waited_least() -> None:
    first, second = run_ranks(slow_rank, 2)
    assert first[2] == second[2] == 4
    assert first[0] > 0.3
    assert second[0] < second[1] - 0.95, "its sleep is not counted as waiting"


def other_thread() -> int:
    with cpu_platform.timed_waits() as waits:
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(8)))
        thread.start()
        thread.join()
    return len(waits)


def test_the_waits_of_other_threads_are_not_counted() -> None:
    assert run_ranks(other_thread, 1) == [0]


def test_timed_waits_puts_the_function_back_after_an_error() -> None:
    original = dist.Work.wait
    with pytest.raises(ZeroDivisionError), cpu_platform.timed_waits():
        assert dist.Work.wait is not original
        _ = 1 / 0
    assert dist.Work.wait is original


def test_meta_tensors_are_cuda_tensors_inside_the_context_only() -> None:
    original, meta, host = functional.rms_norm, torch.empty(2, device="meta"), torch.empty(2)

    def norm(x: Any, *_: Any) -> Any:
        return x

    with pytest.raises(ZeroDivisionError), cpu_platform.meta_as_cuda(norm, norm, norm):
        assert (meta.is_cuda, host.is_cuda) == (True, False)
        assert functional.rms_norm is norm
        _ = 1 / 0
    assert (meta.is_cuda, host.is_cuda) == (False, False)
    assert functional.rms_norm is original and "is_cuda" not in vars(torch.Tensor)


def test_attention_of_meta_tensors_is_replaced_inside_the_context_only() -> None:
    original = functional.scaled_dot_product_attention
    with cpu_platform.meta_as_cpu(torch.add):
        assert functional.scaled_dot_product_attention is torch.add
    assert functional.scaled_dot_product_attention is original


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the real packages are imported")
@pytest.mark.parametrize(
    "package", [pytest.param("flashinfer", marks=pytest.mark.long), "transformer_engine"]
)
def test_a_package_that_cannot_be_imported_without_a_gpu_does_not_stop_megatron(
    package: str, tmp_path: Path
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise OSError('libcuda.so.1')")
    code = (
        "from megatron_stppo.cluster.launch import process; process.prepare(engine=False)\n"
        "from megatron.core.models.gpt import gpt_layer_specs\n"
        "import megatron.core.inference.contexts, megatron_stppo.model.learner\n"
        "print(gpt_layer_specs.HAVE_TE)"
    )
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["False"]
