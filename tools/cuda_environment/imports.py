"""Check that the modules can be imported, as on a GPU, and that torch's CUDA functions stay its own."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator

from tools.cuda_environment import stand_ins

CPU_ONLY = "megatron_stppo.rollout.vllm.cpu"
# need packages that are installed in environments of their own
OTHERS = ("megatron_stppo.agents.packages.openenv", "megatron_stppo.agents.packages.verifiers")
STAND_IN = "vllm.v1.worker.cpu.shm"  # replaces functions of torch while it is imported


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    before = _functions()
    stand_ins.install_platform()
    yield "imports of the engine", engine
    if importlib.util.find_spec("transformer_engine"):  # a bundle has none
        yield "imports of TransformerEngine", transformer_engine
    yield "imports of megatron_stppo", package
    yield "no stand-in of the CPU", lambda: own_functions(before)


def engine() -> str:
    """Import what cluster/launch/process.py imports of vLLM."""
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu_model_runner
    import vllm.v1.worker.gpu_worker

    return f"vLLM {vllm.__version__}"


def transformer_engine() -> str:
    found = importlib.import_module("transformer_engine.pytorch")
    from megatron.core.models.gpt import gpt_layer_specs

    assert gpt_layer_specs.HAVE_TE, "megatron has not found it"
    return f"{len(vars(found))} names"


def package() -> str:
    import megatron_stppo

    names = [found.name for found in pkgutil.walk_packages(megatron_stppo.__path__, "megatron_stppo.")]
    names = [name for name in names if name not in (CPU_ONLY, *OTHERS) and not name.endswith("__main__")]
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert not failed, failed
    return f"{len(names)} modules"


def own_functions(before: dict[str, object]) -> str:
    changed = [name for name, function in _functions().items() if function is not before[name]]
    assert not changed, f"{changed} were replaced"
    loaded = [name for name in (STAND_IN, *CPU_ONLY) if name in sys.modules]
    assert not loaded, f"{loaded} were imported"
    return f"{len(before)} functions of torch are its own"


def _functions() -> dict[str, object]:
    import torch

    names = {
        torch: ("Event", "empty", "tensor"),
        torch.cuda: ("Event", "Stream", "stream", "current_stream", "current_device", "synchronize"),
        torch.accelerator: ("synchronize", "empty_cache", "get_memory_info"),
        torch.Tensor: ("pin_memory", "record_stream", "cuda", "type"),
        torch.distributed: ("all_gather", "reduce_scatter"),
    }
    return {f"{o.__name__}.{name}": getattr(o, name) for o, each in names.items() for name in each}
