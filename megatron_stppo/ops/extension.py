"""The compiled twins of algorithm/: megatron_stppo/_csrc, built from csrc/ by setup.py.

STPPO_OPS in the environment chooses: auto (the default) takes the extension where it was built for the
tensors' device and plain torch otherwise, which the start-up line says; extension demands it; torch leaves it
out.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_stppo.ops.vocab_logprob import Shard

if importlib.util.find_spec("megatron_stppo._csrc") is None:
    _csrc = None  # not built; `serves` says what that means
else:
    from megatron_stppo import _csrc

MODES = ("auto", "extension", "torch")
OK, BAD_OFFSETS = 0, 1
FLOAT32, BFLOAT16 = 0, 1
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
# of csrc/ops.h
SURROGATE_TILE = _csrc.surrogate_tile if _csrc else 0
SURROGATE_ROW = _csrc.surrogate_row if _csrc else 0  # doubles of workspace per tile
SURROGATE_TOTALS = _csrc.surrogate_totals if _csrc else 0
SEGMENT_SUMS = _csrc.segment_sums if _csrc else 0


def parts() -> dict[str, str]:
    """{device: what was built for it}. Example: {"cpu": "built", "cuda": "sm_90a"}."""
    if _csrc is None:
        return {}
    return {"cpu": "built"} | ({"cuda": f"sm_{_csrc.cuda_archs}"} if _csrc.cuda_archs else {})


def serves(device: torch.device) -> bool:
    """Whether the extension computes for this device. Raises RuntimeError if it is demanded and not built."""
    mode = os.environ.get("STPPO_OPS", "auto")
    if mode not in MODES:
        raise RuntimeError(f"STPPO_OPS={mode!r} is not known; choose auto, extension or torch")
    if device.type == "meta":  # a dry run: the op's own memory, and nothing computed
        return True
    built = device.type in parts() and (device.type != "cuda" or _runs_on(device.index or 0))
    if mode == "extension" and not built:
        raise RuntimeError(
            f"STPPO_OPS=extension, but not built for this {device.type} (built: {parts() or 'nothing'}): pip "
            "install --no-build-isolation -e . (for cuda with nvcc on PATH, STPPO_CUDA_ARCHS naming the "
            "device), or STPPO_OPS=auto"
        )
    return built and mode != "torch"


@functools.cache
def _runs_on(index: int) -> bool:
    """Whether code was built for this GPU: 8.6 runs what was built for 80, only 9.0 what was for 90a."""
    return fits(_csrc.cuda_archs, *torch.cuda.get_device_capability(index))


def fits(archs: str, major: int, minor: int) -> bool:
    """Whether code for these architectures runs on a device of this capability. Example: "80;90a" on 8.6."""
    for arch in archs.split(";"):
        number = int(arch.rstrip("af"))
        same_major = number // 10 == major
        if same_major and (number % 10 == minor if arch.endswith("a") else number % 10 <= minor):
            return True
    return False


def run(name: str, device: torch.device, *arguments: Any) -> int:
    """Calls an op: tensors (None: a null pointer) and numbers in the order of csrc/bindings.cpp. Its status.

    On a GPU the op is only enqueued, on the current stream. Raises RuntimeError for a launch that failed.
    """
    if device.type == "meta":
        return OK
    plain = [pointer(x) if x is None or isinstance(x, Tensor) else x for x in arguments]
    op = getattr(_csrc, name)
    if device.type == "cuda":
        with torch.cuda.device(device):
            status = op(*plain, True, torch.cuda.current_stream().cuda_stream)
    else:
        status = op(*plain, False, torch.get_num_threads())
    if status not in (OK, BAD_OFFSETS):
        raise RuntimeError(f"{name} failed with status {status} on {device}")
    return int(status)


def tickets(device: torch.device, count: int) -> Tensor | None:
    """Counters of the current stream, zero before an op and after it; a CPU needs none.

    They are kept, so that an op does not have to clear them: a second stream gets its own.
    """
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        key = (device.index, torch.cuda.current_stream().cuda_stream)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)  # the graph's own
    if key not in _tickets or len(_tickets[key]) < count:
        _tickets[key] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return _tickets[key]


_tickets: dict[tuple[int | None, int], Tensor] = {}


def logits(data: Tensor, shard: Shard) -> Any:
    """csrc's record of logits [T, V_local] and what their rows' numbers depend on."""
    if data.is_meta:
        return None
    per_row = shard.temperature if isinstance(shard.temperature, Tensor) else None
    uniform = 1.0 if per_row is not None else float(shard.temperature)
    return _csrc.Logits(
        pointer(data),
        DTYPES[data.dtype],
        *data.shape,
        shard.valid,
        shard.vocab_start,
        pointer(shard.target),
        pointer(per_row),
        uniform,
        shard.ignore_index,
    )


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
