"""Registration of the kernels with torch.library.

`torch.ops.megatron_stppo` has every kernel for CPU and CUDA. With fake and meta tensors a kernel allocates
its outputs and computes nothing, so the ops work under FakeTensorMode and torch's other dispatch modes.

Gradients come from an autograd.Function around the kernels. torch.library.register_autograd would take tens
of microseconds more per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

NAMESPACE = "megatron_stppo"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
PLAIN = (Tensor, Parameter)
Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def registered(name: str, writes: tuple[str, ...] = ()) -> Callable[[Kernel], Kernel]:
    """Decorator of a kernel: register it as the op `name` and return a function that calls it.

    The kernel takes positional arguments of the types of torch.library.infer_schema, first a tensor. Without
    data (`has_data`) it returns empty tensors of the right shape. writes: arguments that it writes to.

    Plain tensors are given to the kernel directly, because torch's dispatcher takes about 10 us for a Python
    function with 13 arguments. All other calls take the dispatcher.
    """

    def decorate(kernel: Kernel) -> Kernel:
        LIBRARY.define(torch.library.infer_schema(kernel, mutates_args=writes, op_name=name))
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, kernel, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", kernel, lib=LIBRARY)
        op = getattr(getattr(torch.ops, NAMESPACE), name).default

        @functools.wraps(kernel)
        def call(*args: Any) -> Any:
            plain = has_data(args[0]) and not torch._C._len_torch_dispatch_stack()
            return kernel(*args) if plain else op(*args)

        return call  # type: ignore[return-value]

    return decorate


def has_data(tensor: Tensor) -> bool:
    """Return whether the tensor's memory can be read: False for a fake or a meta tensor."""
    return type(tensor) in PLAIN and not tensor.is_meta


def is_one(cotangent: Tensor) -> bool:
    """Return whether a 0-d cotangent is 1, so that the product with it can be left out. False on a GPU, where
    reading it would make the host wait."""
    return cotangent.is_cpu and has_data(cotangent) and cotangent.item() == 1
