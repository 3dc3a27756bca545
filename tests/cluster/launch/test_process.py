"""Warnings that a rank shows, the ranks of a node, and a TransformerEngine whose libraries do not load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pynvml
import pytest
import torch

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import ConfigError
from tests.ranks import run_ranks

PROGRAM = """
import warnings
from megatron_stppo.cluster.launch import process

process._ignore_warnings()
for module in ("megatron.core.models", "vllm", "vllm.config", "megatron_stppo.loop", "vllms", "torch.cuda"):
    for category in (UserWarning, RuntimeWarning):
        text = f"{category.__name__} of {module}"
        warnings.warn_explicit(text, category, "a.py", 1, module=module, registry={})
"""


def test_only_the_warnings_of_named_modules_and_categories_are_silent() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    shown = [line.partition(": ")[2].split(": ")[1] for line in done.stderr.splitlines()]
    assert shown == [
        "RuntimeWarning of megatron.core.models",
        "RuntimeWarning of vllm",
        "RuntimeWarning of vllm.config",
        *(f"{kind} of megatron_stppo.loop" for kind in ("UserWarning", "RuntimeWarning")),
        *(f"{kind} of vllms" for kind in ("UserWarning", "RuntimeWarning")),
        *(f"{kind} of torch.cuda" for kind in ("UserWarning", "RuntimeWarning")),
    ]


def test_threads_are_a_share_of_the_cores_and_at_most_those_that_a_process_is_bound_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process.os, "cpu_count", lambda: 64)
    for bound, processes, expected in ((64, 8, 8), (4, 8, 4), (64, 1, 64), (64, 100, 1)):
        monkeypatch.setattr(process.os, "sched_getaffinity", lambda _, n=bound: set(range(n)))
        assert process.threads(processes) == expected


def test_a_transformer_engine_whose_libraries_do_not_load_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.check_transformer_engine()  # none is installed
    (tmp_path / "transformer_engine.py").write_text(
        "raise OSError('libcudnn_graph.so.9: undefined symbol')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"libcudnn_graph\.so\.9: undefined symbol; put the folders"):
        process.check_transformer_engine()


OLD = r"^GPU driver 550.54: is for CUDA 12, torch for CUDA 13; install a newer one \(580"
LOST = r"^GPU driver 550.54: has 8 GPUs, torch has none \(Torch not compiled.*start nvidia-fabricmanager"


@pytest.mark.parametrize(
    ("visible", "init", "cuda", "devices", "torch_cuda", "refused"),
    [
        ("0", None, 12040, 8, "13.0", OLD),
        ("", None, 12040, 8, "13.0", ""),
        ("-1", None, 12040, 8, "13.0", ""),
        ("NoDevFiles", None, 12040, 8, "13.0", ""),  # Slurm, without a GPU
        ("0,1", None, 13000, 8, "13.0", LOST),
        (" 1", None, pynvml.NVMLError_LibraryNotFound(), 8, "13.0", LOST),
        ("0", None, 13000, 8, None, ""),  # torch for CPUs
        ("0", None, 13000, 0, "13.0", ""),
        ("0", pynvml.NVMLError_LibRmVersionMismatch(), 0, 0, "13.0", "mismatch.*; reboot"),
        ("0", pynvml.NVMLError_DriverNotLoaded(), 0, 0, "13.0", ""),
    ],
)
def test_a_driver_with_which_torch_sees_no_gpu_is_one_line_and_not_a_run_on_the_cpu(
    visible: str, init: Any, cuda: Any, devices: int, torch_cuda: str, refused: str, monkeypatch: Any
) -> None:
    nvml = {"Init": Mock(side_effect=init), "Shutdown": Mock(), "SystemGetDriverVersion": lambda: "550.54"}
    nvml |= {"SystemGetCudaDriverVersion_v2": Mock(side_effect=[cuda]), "DeviceGetCount": lambda: devices}
    nvml |= {"DeviceGetHandleByIndex": str, "DeviceGetCudaComputeCapability": lambda _: (9, 0)}
    for name, answer in nvml.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(process, "_ignore_warnings", lambda: sys.exit("accepted"))
    with pytest.raises(ConfigError if refused else SystemExit, match=refused or "accepted"):
        process.prepare.__wrapped__(False)


def nodes_of_two_and_of_one() -> tuple[int, int]:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    one_node = process.ranks_per_node()
    os.environ["LOCAL_WORLD_SIZE"] = "1" if os.environ["RANK"] == "2" else "2"
    return one_node, process.ranks_per_node()


def test_all_ranks_agree_on_the_ranks_of_a_node_even_if_nodes_differ() -> None:
    assert run_ranks(nodes_of_two_and_of_one, 3) == [(3, 2)] * 3
