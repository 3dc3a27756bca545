"""A GPU that computes nothing, to find where the host waits for it and where tensors are on the wrong device.

Tensors on device="cuda" are meta tensors, and say that they are on cuda:0. Tensors on the host have their
values. FakeTensorMode is not used: where torch is built without CUDA, it cannot run a backward pass of CUDA
tensors ("Cannot access accelerator device when none is available"), nor slice them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_stppo.plan.meter import every_row, tensors_in

aten = torch.ops.aten
CUDA, META = torch.device("cuda", 0), torch.device("meta")
ROOTS = (str(Path(__file__).parents[1] / "megatron_stppo") + "/", "/megatron/core/")
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
COALESCED = (
    torch.ops.c10d.reduce_scatter_tensor_coalesced_.default,
    torch.ops.c10d.allgather_into_tensor_coalesced_.default,
)
NO_KERNEL = re.compile(r".*::(new_)?(empty|_unsafe_view|detach).*")
_inside: list[Any] = []  # the operation that is being dispatched


def install() -> None:
    """Make meta tensors say that they are on a GPU, in a process of its own, after process.prepare."""
    torch.cuda._lazy_init = lambda: None  # torch calls it when it reads device="cuda"
    tensor: Any = Tensor
    device = Tensor.device.__get__
    # not inside an operation, where torch's functions for meta tensors make outputs on their inputs' device
    tensor.device = property(lambda self: CUDA if self.is_meta and not _inside else device(self))
    tensor.is_cuda = property(lambda self: self.is_meta and not _inside)
    tensor.pin_memory = _pinned
    to, make = Tensor.to, torch.tensor  # these would look for the driver
    tensor.to = lambda self, *args, **kwargs: to(
        self, *map(_meta, args), **{name: _meta(x) for name, x in kwargs.items()}
    )
    torch.tensor = lambda data, *, device="cpu", **kwargs: make(data, **kwargs).to(device)
    torch.nn.functional.rms_norm = lambda x, shape, weight, eps: FusedNorm.apply(x, weight)


def _meta(argument: Any) -> Any:
    """Return device="meta" for a GPU's, and any other argument of Tensor.to unchanged."""
    is_device = isinstance(argument, str | torch.device)
    return META if is_device and torch.device(argument).type == "cuda" else argument


class FusedNorm(torch.autograd.Function):
    """A norm as CUDA computes it: a kernel forward, two backward. Without a GPU torch uses more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return gradient.clone(), weight.clone()


def _pinned(self: Tensor) -> Tensor:
    assert not self.is_meta, "only host memory can be pinned"
    out: Any = self.clone()
    out.pinned = True
    return out


class StandInGpu(TorchDispatchMode):
    """The GPU of the calling thread. `waits` counts (what makes the host wait, place in our code or
    megatron's), `launches` the operations that write memory of the GPU: each launches a kernel or more.

    A value that the host reads is 1, False if it is a flag, and a mask chooses every row.
    Raises AssertionError for an operation on tensors of the host and of the GPU, which CUDA refuses.
    Operations that make the host wait and have no version for meta tensors, such as torch.unique, raise
    NotImplementedError.
    """

    def __init__(self, read: Mapping[str, Tensor] | None = None) -> None:
        """read: {place: the values that are copied to the host there}."""
        super().__init__()
        self._read = read or {}
        self.waits: Counter[tuple[str, str]] = Counter()
        self.launches = 0

    def __enter__(self) -> Any:
        cuda: Any = torch.cuda
        cuda.synchronize = lambda *args, **kwargs: self._wait("synchronize")
        for owner in (cuda.Stream, cuda.Event):
            owner.synchronize = lambda *args: self._wait("synchronize")
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _inside.append(func)
        try:
            out = self._dispatched(func, args, dict(kwargs or {}))
        finally:
            _inside.pop()
        results = [result.alias_info for result in func._schema.returns]
        is_view = bool(results) and all(alias is not None and not alias.is_write for alias in results)
        if not is_view and not NO_KERNEL.match(func._schema.name):
            self.launches += any(x.is_meta for x in tensors_in((out,)))
        return out

    def _dispatched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        to = kwargs.get("device")
        if to is not None and torch.device(to).type == "cuda":
            kwargs["device"] = META
        kwargs.pop("pin_memory", None)  # needs a driver
        given = list(tensors_in((args, tuple(kwargs.values()))))
        on_gpu = [x for x in given if x.is_meta]
        if func is aten._to_copy.default:
            return self._copied(func, to, *args, **kwargs)
        if func is aten.copy_.default:
            return self._written(func, *args, **kwargs)
        if not on_gpu:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self._wait("item")
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is aten.nonzero.default:
            self._wait("nonzero")
            return every_row(args[0])
        if func is aten.masked_select.default:
            self._wait("masked_select")
            return args[0].new_empty(args[1].numel())
        if func in COALESCED:  # torch has no version for meta tensors
            return FakeWork().boxed()
        if func in INDEXED:
            # where one number is written through a mask, CUDA fills, without reading the mask
            fills = len(args) > 2 and args[2].numel() == 1
            indices = [index for x in args[1] for index in self._indices(x, fills)]
            return func(args[0], indices, *args[2:], **kwargs)
        on_host = [x for x in given if not x.is_meta and x.dim() > 0]
        assert not on_host, f"{func} on host and GPU: {[(x.device, x.shape) for x in given]}"
        return func(*args, **kwargs)

    def _copied(self, func: Any, to: Any, x: Tensor, **kwargs: Any) -> Tensor:
        if x.is_meta and to is not None and torch.device(to).type == "cpu":
            if not kwargs.get("non_blocking"):
                self._wait("copy to the host")
            return self._read.get(_place(), torch.ones(x.shape, dtype=kwargs.get("dtype") or x.dtype))
        if not x.is_meta and kwargs.get("device") == META:
            self._sent(x, kwargs.get("non_blocking"))
        return func(x, **kwargs)

    def _written(self, func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if target.is_meta and not source.is_meta:
            self._sent(source, non_blocking)
        elif source.is_meta and not target.is_meta:
            if not non_blocking:
                self._wait("copy to the host")
            return target.fill_(1)
        return func(target, source)

    def _sent(self, x: Tensor, non_blocking: bool | None) -> None:
        if not non_blocking:
            self._wait("copy to the GPU")
        elif not hasattr(x, "pinned"):
            self._wait("copy of pageable memory to the GPU")

    def _indices(self, index: Tensor | None, fills: bool) -> Sequence[Tensor | None]:
        """Return a mask as one index per dimension, any other index as it is."""
        if index is None:
            return [None]
        if not index.is_meta and index.dim():
            self._wait("index on the host")
        if index.dtype != torch.bool:
            return [index.to("meta")]
        if not fills:
            self._wait("index with a mask")
        return every_row(index).unbind(1)

    def _wait(self, what: str) -> None:
        self.waits[what, _place()] += 1


def _place() -> str:
    """Return file and function of the innermost frame in our package or in megatron-core."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        for root in ROOTS:
            if root in name:
                inside = name.split(root)[1]
                megatron = "megatron: " if root is ROOTS[1] else ""
                return f"{megatron}{inside} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"
