"""Compare vLLM's CUDA model classes, on the meta device, with the tensors that the reshard writes.

One process takes the place of each tensor rank in turn, in process groups that transfer nothing.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tools.cuda_environment import models, stand_ins

TENSOR = (1, 2, 4)  # with 2 KV heads: whole, divided, and repeated


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    stand_ins.install_platform()
    with tempfile.TemporaryDirectory() as scratch:
        for family in models.FAMILIES:
            folder = models.write_config(Path(scratch), family)
            for tensor in TENSOR:
                yield f"vLLM {family}, tensor {tensor}", functools.partial(compare, folder, tensor)
        yield "vLLM's all-reduce", functools.partial(all_reduce, folder)


def all_reduce(folder: Path) -> str:
    """Raise AssertionError if an engine of several ranks would use FlashInfer's all-reduce."""
    import vllm.envs
    from vllm.utils.flashinfer import has_flashinfer

    from megatron_stppo.rollout.vllm.vllm_setup import EngineSettings, engine_arguments

    given = EngineSettings(folder, tensor=2, dtype="bfloat16", max_context=1024, max_sequences=16)
    assert has_flashinfer(), "FlashInfer is not installed, so this check says nothing"
    with mock.patch.dict("os.environ", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2"):
        config = engine_arguments(given, token="").create_engine_config()
    assert config.parallel_config.tensor_parallel_size == 2
    assert config.compilation_config.pass_config.fuse_allreduce_rms is False, "fused with RMSNorm"
    assert not vllm.envs.VLLM_ALLREDUCE_USE_FLASHINFER, "VLLM_ALLREDUCE_USE_FLASHINFER"
    return "not FlashInfer's"


def compare(folder: Path, tensor: int) -> str:
    """Build every rank's shard. Raise AssertionError if a name or a shape is not the reshard's."""
    from megatron_stppo.rollout.vllm.vllm_setup import weights
    from megatron_stppo.weights.reshard.resharder import mismatch
    from megatron_stppo.weights.sharding.hf_names import read_shape
    from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts

    shape = read_shape(folder)
    layouts, count = serving_layouts(shape, tensor, tensor), 0
    for rank in range(tensor):
        with _built(folder, tensor, rank) as model:
            found = weights(model)
            problem = mismatch("engine", found, layouts[rank], row_widths(shape), all_named=True)
            assert not problem, f"rank {rank}: {problem}"
            count += len(found)
            kind = type(model).__name__
    return f"{kind}: {count} tensors on {tensor} rank{'s' * (tensor > 1)}"


@contextlib.contextmanager
def _built(folder: Path, tensor: int, rank: int) -> Iterator:
    """Yield the model that vLLM builds for Engine's arguments, after vLLM's changes to loaded weights."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from megatron_stppo.rollout.vllm.vllm_setup import EngineSettings, engine_arguments

    new_group = dist.new_group
    given = EngineSettings(
        folder, tensor=tensor, dtype="bfloat16", float32_logits=True, max_context=1024, max_sequences=16
    )
    arguments = engine_arguments(given, token="")
    dist.init_process_group("fake", rank=rank, world_size=tensor, store=FakeStore())
    silent = {"backend": "fake"}
    with (
        mock.patch.dict("os.environ", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(tensor)),
        mock.patch.object(dist, "new_group", lambda ranks, **given: new_group(ranks, **(given | silent))),
        mock.patch.object(parallel_state, "_node_count", lambda group: 1),
        mock.patch.object(MessageQueue, "create_from_process_group", lambda *given: None),
    ):
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            try:
                parallel_state.init_distributed_environment(tensor, rank, "env://", rank, "fake")
                parallel_state.initialize_model_parallel(tensor, backend="fake")
                with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
                    model = initialize_model(config)
                    before = {name: _memory(weight) for name, weight in model.named_parameters()}
                    process_weights_after_loading(model, config.model_config, torch.device("meta"))
                after = {name: _memory(weight) for name, weight in model.named_parameters()}
                changed = sorted(name for name in before | after if before.get(name) != after.get(name))
                assert not changed, f"vLLM lays {changed[:4]} out anew after loading"
                yield model
            finally:
                parallel_state.destroy_model_parallel()
                parallel_state.destroy_distributed_environment()


def _memory(weight: Any) -> tuple:
    return weight.untyped_storage()._cdata, weight.storage_offset(), weight.shape, weight.stride()
