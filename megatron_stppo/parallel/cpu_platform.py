"""Makes megatron-core work on a machine without a CUDA device, over gloo.

megatron-core gets the current device, streams, events and random state from torch.cuda, passes device="cuda"
to tensor factories, and checks parameter types by their CUDA names. `install()` replaces these functions, and
no others, by CPU versions: `torch.cuda.is_available()` still returns False, and results are computed by the
same megatron code as on a GPU. Call it after vLLM is imported (vLLM checks torch.cuda during its import) and
before megatron is imported. With device="meta", tensors have shapes but no memory, for a dry run.

No other file replaces functions in modules or classes of torch, megatron or Python. What a run needs for a
while only is a context at the end of this file, which puts the original functions back.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

FACTORIES = "tensor empty zeros ones full arange rand randn empty_like zeros_like".split()
CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}
# megatron imports these if they are installed. Without a GPU and its driver the import fails, and not always
# with the ImportError that megatron expects.
NEED_GPU = ("flashinfer", "transformer_engine")


class Stream:
    """A stream without pending work: the CPU executes operations in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None: ...


class Event:
    """An event that is always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


def needed() -> bool:
    return not torch.cuda.is_available()


def install(device: str = "cpu") -> None:
    """Replace functions of torch.cuda and torch by versions for `device` ("cpu" or "meta").

    Packages of NEED_GPU that are not imported yet can no longer be imported.
    Call it once in a process, before megatron is imported, and only where needed().
    """
    assert needed() and "megatron.core" not in sys.modules, "too late, or on a machine with a CUDA device"
    _substitute_cuda(device)
    # Wrappers instead of a TorchFunctionMode, which would also slow down every operation of the engine.
    for name in FACTORIES:
        setattr(torch, name, _instead_of_cuda(getattr(torch, name), device))
    _substitute_type_names()
    _substitute_uneven_collectives()
    modules: dict[str, Any] = sys.modules
    for name in NEED_GPU:
        modules.setdefault(name, None)  # an import raises ModuleNotFoundError
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    # torch's hooks for lazy initialisation, which megatron imports by name; a CPU needs no initialisation
    megatron_random._lazy_call = lambda callback, **kwargs: callback()
    megatron_random._lazy_init = lambda: None
    # an all-to-all needs its split sizes as numpy arrays; megatron makes these only when it copies from a GPU
    dispatcher.maybe_move_tensor_to_cpu = _as_moved
    # created here, because vLLM's workers replace torch.cuda.Stream by a class that does not record events
    dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = Stream()


def _as_moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _substitute_cuda(device: str) -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: device
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.is_initialized = lambda: True
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to(device)  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    cuda.Stream, cuda.Event = Stream, Event
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *args, **kwargs: Stream())
    cuda.stream = lambda stream: contextlib.nullcontext()
    for module in (cuda, cuda.random):  # two objects, because dynamo rejects one object under two names
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.default_generators = {device: torch.default_generator}
    cuda._lazy_call = lambda callback, **kwargs: callback()


def _instead_of_cuda(factory: Callable[..., torch.Tensor], device: str) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = kwargs.get("device")
        if wanted is not None and str(wanted).startswith("cuda"):
            kwargs["device"] = device
        return factory(*args, **kwargs)

    return wrapper


def _substitute_type_names() -> None:
    plain = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and self.dtype in CUDA_TYPE_NAMES:
            return CUDA_TYPE_NAMES[self.dtype]
        return plain(self, *args, **kwargs)

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]


def _substitute_uneven_collectives() -> None:
    """Implement all_gather and reduce_scatter with pieces of different sizes by an all-to-all.

    NCCL supports different sizes in these collectives, but gloo does not.
    """
    module: Any = dist
    all_gather, reduce_scatter = module.all_gather, module.reduce_scatter

    def gather(pieces: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        if len({piece.shape for piece in pieces}) == 1:
            return all_gather(pieces, tensor, group=group, **kwargs)
        sizes = [len(piece) for piece in pieces]
        received = tensor.new_empty(sum(sizes), *tensor.shape[1:])
        dist.all_to_all_single(
            received, torch.cat([tensor] * len(sizes)), sizes, [len(tensor)] * len(sizes), group=group
        )
        for piece, own in zip(pieces, received.split(sizes), strict=True):
            piece.copy_(own)

    def scatter(output: torch.Tensor, pieces: list[torch.Tensor], *args: Any, group: Any = None) -> Any:
        if len({piece.shape for piece in pieces}) == 1:
            return reduce_scatter(output, pieces, *args, group=group)
        assert not args, "sums only"
        sizes = [len(piece) for piece in pieces]
        received = output.new_empty(len(sizes), *output.shape)
        dist.all_to_all_single(
            received.flatten(0, 1), torch.cat(pieces), [len(output)] * len(sizes), sizes, group=group
        )
        output.copy_(received.sum(0))

    module.all_gather, module.reduce_scatter = gather, scatter


@contextlib.contextmanager
def timed_waits() -> Iterator[list[float]]:
    """Yield a list that receives the seconds of each Work.wait of this thread inside the context.

    Every operation of gloo calls Work.wait, those that megatron starts included. Other threads, such as a
    checkpoint's writer, are not measured.
    """
    wait, waits, own = dist.Work.wait, list[float](), threading.get_ident()

    def timed(work: dist.Work, *timeout: Any) -> Any:
        started = time.perf_counter()
        try:
            return wait(work, *timeout)
        finally:
            if threading.get_ident() == own:
                waits.append(time.perf_counter() - started)

    with _replaced(dist.Work, "wait", timed):
        yield waits


@contextlib.contextmanager
def meta_as_cuda(
    rms_norm: Callable[..., torch.Tensor],
    swiglu: Callable[..., torch.Tensor],
    swiglu_back: Callable[..., torch.Tensor],
) -> Iterator[None]:
    """Inside the context, meta tensors take the code paths of CUDA tensors, for the dry run of a GPU.

    The arguments are the RMS norm of a meta tensor, and SwiGLU and its gradient. Those of torch and megatron
    are several operations on meta tensors, which keep more memory.
    """
    from megatron.core.fusions import fused_bias_swiglu

    # A TorchFunctionMode would not work: it is inactive while a backward recomputes a forward.
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda self: self.is_meta)  # hides the property of the base class
    try:
        with (
            _replaced(functional, "rms_norm", rms_norm),
            _replaced(fused_bias_swiglu, "swiglu", swiglu),
            _replaced(fused_bias_swiglu, "swiglu_back", swiglu_back),
        ):
            yield
    finally:
        del tensor.is_cuda


@contextlib.contextmanager
def meta_as_cpu(attention: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Inside the context, `attention` computes the attention of meta tensors, for the dry run of a CPU.

    torch's own would be several operations, which keep more memory.
    """
    with _replaced(functional, "scaled_dot_product_attention", attention):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
