"""vLLM's linear layers on a CPU, computed directly from the engine's parameters.

When vLLM loads a model it copies linear weights into a layout for oneDNN and drops the plain ones. A reshard
that writes into the parameters would then not change the result. This module sets two private switches of
vLLM; they are tested with the pinned version.
"""

from __future__ import annotations

from typing import Any

from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


def keep_plain() -> None:
    """Set the two switches for all engines of this process. It may be called more than once.

    The second one is for the language-model head, which is an embedding.
    """
    setattr(LinearBase, "_cpu_skip_gemm_dispatch", True)  # noqa: B010 - vLLM reads it without declaring it
    setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", _plain_head)  # noqa: B010


def _plain_head(method: UnquantizedEmbeddingMethod, layer: Any) -> None:
    layer.cpu_linear = linear
