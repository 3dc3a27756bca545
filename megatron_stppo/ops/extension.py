"""Calls of the compiled extension megatron_stppo/_csrc, which setup.py builds from csrc/, and the check of
their arguments: in this order device, dtype, shape, contiguity.

The environment variable STPPO_OPS selects the implementation:
auto (default): the extension if it was built for the tensors' device, else the torch fallback; the start-up
line reports which one is used.
extension: the extension, or an error if it was not built for the device.
torch: the torch fallback.
"""

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_csrc: Any = None  # not built; `serves` handles this
if importlib.util.find_spec("megatron_stppo._csrc") is not None:
    _csrc = importlib.import_module("megatron_stppo._csrc")

MODES = ("auto", "extension", "torch")
OK, BAD_OFFSETS = 0, 1
FLOAT32, BFLOAT16 = 0, 1
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
# constants of csrc/ops.h
SURROGATE_ROW = _csrc.surrogate_row if _csrc else 0  # doubles of workspace per tile
COPY_PIECE = _csrc.copy_piece if _csrc else 0  # elements
CHECKSUM_BLOCK = _csrc.checksum_block if _csrc else 0  # 16-bit numbers


def parts() -> dict[str, str]:
    """Return what was built for each device type. Example: {"cpu": "built", "cuda": "sm_90a"}."""
    return _parts(_csrc)


@functools.cache
def _parts(module: Any) -> dict[str, str]:
    if module is None:
        return {}
    return {"cpu": "built"} | ({"cuda": f"sm_{module.cuda_archs}"} if module.cuda_archs else {})


def applies(tensor: Tensor) -> bool:
    """Return whether an op uses its kernel for this tensor. True without data: it then only allocates."""
    return not has_data(tensor) or serves(tensor.device)


def serves(device: torch.device) -> bool:
    """Return whether the extension is used for this device.

    Raises RuntimeError if STPPO_OPS is unknown, or if it is "extension" and the extension was not built for
    the device.
    """
    mode = os.environ.get("STPPO_OPS", "auto")
    built = device.type in parts() and (device.type != "cuda" or _runs_on(device.index or 0))
    if mode == "auto":
        return built
    if mode not in MODES:
        raise RuntimeError(f"STPPO_OPS={mode!r} is not known; choose auto, extension or torch")
    if mode == "extension" and not built:
        raise RuntimeError(
            f"STPPO_OPS=extension, but not built for this {device.type} (built: {parts() or 'nothing'}); run "
            "pip install --no-build-isolation -e . (for cuda with nvcc on PATH, STPPO_CUDA_ARCHS naming the "
            "device), or set STPPO_OPS=auto"
        )
    return mode == "extension"


@functools.cache
def _runs_on(index: int) -> bool:
    """Return whether the extension has code that runs on this GPU."""
    return fits(_csrc.cuda_archs, *torch.cuda.get_device_capability(index))


def fits(archs: str, major: int, minor: int) -> bool:
    """Return whether code built for the architectures `archs` runs on a device of capability major.minor.

    Code for 80 runs on 8.0 and every later 8.x; code for 90a runs only on 9.0.
    Example: fits("80;90a", 8, 6) is True.
    """
    for arch in archs.split(";"):
        number = int(arch.rstrip("af"))
        same_major = number // 10 == major
        if same_major and (number % 10 == minor if arch.endswith("a") else number % 10 <= minor):
            return True
    return False


def run(name: str, device: torch.device, *arguments: Any) -> int:
    """Call the op `name` of the extension and return its status, OK or BAD_OFFSETS.

    arguments: tensors (None: a null pointer) and numbers, in the order of csrc/bindings.cpp. On a GPU the op
    is only enqueued, on the current stream. Raises RuntimeError for any other status, as of a failed launch.
    """
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


def surrogate_tiles(work: int) -> int:
    """Return the number of tiles of the surrogate's workspace.

    work: tokens + segments, or tokens if every token is a segment. Example: surrogate_tiles(2047) is 2.
    """
    return int(_csrc.surrogate_tiles(work))


def tickets(device: torch.device, count: int) -> Tensor | None:
    """Return at least `count` int32 counters of the current stream; None on a CPU, which needs none.

    Ops expect zeros and leave zeros, so the counters are reused without being cleared. Each stream has its
    own. While a CUDA graph is captured, new counters are allocated for the graph.
    """
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        key = (device.index, torch.cuda.current_stream().cuda_stream)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)  # owned by the graph
    if key not in _tickets or len(_tickets[key]) < count:
        _tickets[key] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return _tickets[key]


_tickets: dict[tuple[int | None, int], Tensor] = {}


def logits(*arguments: Any) -> Any:
    """Return csrc's record of logits, see Shard.record in ops/shard.py."""
    return _csrc.Logits(*arguments)


def has_data(tensor: Tensor) -> bool:
    """Return whether the tensor's memory can be read: False for a meta tensor, for which a kernel only
    allocates its outputs."""
    return not tensor.is_meta


def to_device(tensor: Tensor, device: torch.device | str | int) -> Tensor:
    """Return a host tensor on `device`. The host does not wait for the GPU.

    A copy from pageable memory would make it wait, even with non_blocking=True.
    """
    if torch.device(device).type == "cuda" and has_data(tensor):
        tensor = tensor.pin_memory()  # torch keeps the pinned memory until the copy is done
    return tensor.to(device, non_blocking=True)


def is_one(cotangent: Tensor) -> bool:
    """Return whether a 0-d cotangent is 1, so that the product with it can be left out. False on a GPU, where
    reading it would make the host wait."""
    return cotangent.is_cpu and cotangent.item() == 1


def pointer(tensor: Tensor | None) -> int:
    """Return the tensor's address; 0 for None and for a tensor without data."""
    return tensor.data_ptr() if tensor is not None and has_data(tensor) else 0


def check(
    name: str,
    tensor: Tensor,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
) -> None:
    """Raise ValueError, with the argument's name and the remedy, if the tensor does not fit.

    None in `shape` matches any length.
    """
    fits = tensor.shape == shape and tensor.device == device and tensor.dtype in dtypes
    if fits and tensor.is_contiguous():
        return  # the usual case, in half the time of the checks below
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; move it to {device}, where the first argument is")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}; give {wanted}")
    fits = len(tensor.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; give [{wanted}]")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous; call .contiguous() first")
